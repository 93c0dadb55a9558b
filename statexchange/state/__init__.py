"""Live state: one walk over trees, modules, optimizers, DTensors and Megatron-Core's sharded dicts."""
