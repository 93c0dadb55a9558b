"""Live state: trees, modules, optimizers, DTensors and Megatron-Core's sharded dicts. Nothing here communicates."""
