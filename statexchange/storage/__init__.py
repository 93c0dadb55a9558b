"""Files and objects: durable publication, the tensor file and the workspace. No torch, no ranks."""
