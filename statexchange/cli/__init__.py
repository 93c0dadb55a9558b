"""The command line: commands, output and exit codes. Each command imports what it needs only when it runs."""
