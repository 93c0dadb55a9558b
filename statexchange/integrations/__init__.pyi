from statexchange.integrations.random import RandomState as RandomState
from statexchange.integrations.transformers import CheckpointsTrainer as CheckpointsTrainer
from statexchange.integrations.transformers import ExportCallback as ExportCallback

__all__: list[str]
