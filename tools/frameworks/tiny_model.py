"""The models that the scripts here train and save, with tensors of sizes that two ranks cannot share evenly."""

import torch


class Block(torch.nn.Module):
    """A layer, which FSDP wraps."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 5)

    def forward(self, x):
        return self.linear(x).relu()


class TinyModel(torch.nn.Module):
    """A block and a head; called with labels it returns a loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.head = torch.nn.Linear(5, 1)

    def forward(self, x, labels=None):
        out = self.head(self.block(x))
        return out if labels is None else {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


def rows(count):
    """Return a data set of pairs of inputs and labels, equal in each process."""
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum().reshape(1)} for row in x]


def tiny_llama():
    """Return a model of transformers in float32, whose logits tests compare."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"], dtype="float32"))


def tokens():
    """Return the input for which the logits are computed."""
    return torch.arange(8).reshape(1, 8)
