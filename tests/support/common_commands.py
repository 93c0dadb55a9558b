"""Sources that all commands read."""

from command_lines import COMMAND_LINES

# Quiet and verbose

SHARED = [lines.shared.split() for name, lines in COMMAND_LINES.items() if name != "demo"]  # which varies
