from statexchange.integrations.random import RandomState as RandomState
from statexchange.integrations.transformers import CheckpointsTrainer as CheckpointsTrainer

__all__: list[str]
