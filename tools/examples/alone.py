"""Train a model in one process and export it: the same calls as with many ranks.

python tools/examples/alone.py OUT
"""

import sys

import torch
from safetensors.torch import load_file
from torch import nn

import statexchange as sx

TEXT = torch.tensor(list(sys.copyright.encode() * 40))


def main(out: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 30), nn.Flatten(), nn.Linear(8 * 30, 101), nn.ReLU(), nn.Linear(101, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        at = (torch.arange(64) * 7 + step * 64) % (len(TEXT) - 9)
        loss = nn.functional.cross_entropy(model(torch.stack([TEXT[i : i + 8] for i in at])), TEXT[at + 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, 59):
            print(f"step {step}: loss {loss.item():.2f}")

    report = sx.export_checkpoint(model, out)

    merged = load_file(f"{out}/model.safetensors")
    state = model.state_dict()
    equal = sum(torch.equal(merged[name], tensor) for name, tensor in state.items())
    print(f"{equal} of {len(state)} tensors bit-equal; ranks supplied {report.rank_nbytes} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
