"""The command line: commands, output and exit codes. A command imports a room only when it runs."""
