"""The command line: commands, output and exit codes. Each command imports a package only when it runs."""
