"""Entry point: ``python tools/slurm_lab``."""

import os
import sys

if not __package__:  # started as a directory: the package lies one level up
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from slurm_lab.cli import main

sys.exit(main())
