"""Write the samples of tests/data/foreign with the libraries whose formats they are.

pip install flax==0.12.8 gguf==0.19.0 h5py==3.16.0 onnx==1.23.2 orbax-checkpoint==0.12.8 zarr==3.1.6
python tools/frameworks/foreign_write.py tests/data/foreign
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import flax.serialization
import gguf
import h5py
import jax.numpy as jnp
import numpy as np
import onnx
import orbax.checkpoint as ocp
import zarr

WEIGHT, BIAS = np.arange(64, dtype="f4").reshape(2, 32), np.ones(3, "i8")


def write_gguf(path: Path) -> None:
    """A file of an architecture, a vocabulary, and tensors plain and quantised."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<s>", "</s>", "a", "b"])
    writer.add_token_scores([0.0, 0.0, -1.0, -2.0])
    writer.add_tensor("token_embd.weight", WEIGHT)
    writer.add_tensor("blk.0.attn_q.weight", WEIGHT.astype("f2"))
    quantized = gguf.quants.quantize(WEIGHT, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_msgpack(path: Path) -> None:
    """A file as Flax models of transformers were saved: nested parameters, one of which was split."""
    state = {
        "params": {"dense": {"kernel": WEIGHT, "bias": jnp.ones(3, jnp.bfloat16)}, "layers": {"0": {"scale": BIAS}}},
        "step": 7,
        "rate": np.float32(0.5),
        "name": "tiny",
    }
    flax.serialization.MAX_CHUNK_SIZE = 100  # the real limit is 1 GiB
    path.write_bytes(flax.serialization.msgpack_serialize(state))


def write_zarr(root: Path) -> None:
    """A group of version 2, and one of version 3."""
    for name, version in (("zarr2", 2), ("zarr3", 3)):
        group = zarr.open_group(root / name, mode="w", zarr_format=version)
        group.create_array("layer/weight", data=WEIGHT, chunks=(1, 32))
        group.create_array("layer/bias", data=BIAS)


def write_hdf5(path: Path) -> None:
    """A file with two datasets in a group."""
    with h5py.File(path, "w", libver="latest") as file:
        file["layer/weight"], file["layer/bias"] = WEIGHT, BIAS


def write_onnx(path: Path) -> None:
    """A graph of one product with a constant."""
    shapes = {"x": [1, 2], "y": [1, 32]}
    inputs, outputs = (
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)] for name, shape in shapes.items()
    )
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "graph", inputs, outputs, [onnx.numpy_helper.from_array(WEIGHT, "w")])
    onnx.save(onnx.helper.make_model(graph, producer_name="tiny"), path)


def write_orbax(root: Path) -> None:
    """A step of a CheckpointManager, as Flax and MaxText use it, and a tree without OCDBT."""
    tree = {"params": {"dense": {"kernel": jnp.asarray(WEIGHT), "bias": jnp.ones(3, jnp.bfloat16)}}, "step": 7}
    with ocp.CheckpointManager((root / "manager").absolute()) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave(tree)))
        manager.wait_until_finished()
    (root / "manager/3").rename(root / "orbax")
    shutil.rmtree(root / "manager")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save((root / "orbax-zarr").absolute(), ocp.args.PyTreeSave(tree))


def main() -> None:
    """Write all samples into the directory that is named."""
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    write_gguf(root / "model.gguf")
    write_msgpack(root / "flax_model.msgpack")
    np.savez_compressed(root / "arrays.npz", weight=WEIGHT, bias=BIAS, text=np.array(["a", "b"]))
    np.save(root / "array.npy", WEIGHT.astype(">f2"))
    write_hdf5(root / "model.h5")
    write_onnx(root / "model.onnx")
    write_zarr(root)
    write_orbax(root)


if __name__ == "__main__":
    main()
