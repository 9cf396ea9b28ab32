"""The shape of a GPT: one frozen, validated dataclass, and the named sizes. Defaults for writing with it."""

from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real

from gpt.errors import InputError
from gpt.plain import JsonObject, shown

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2; heads are 64 wide.
_SIZES: dict[str, dict[str, int]] = {
    "gpt2-small": {"emb_dim": 768, "num_heads": 12, "num_layers": 12},
    "gpt2-medium": {"emb_dim": 1024, "num_heads": 16, "num_layers": 24},
    "gpt2-large": {"emb_dim": 1280, "num_heads": 20, "num_layers": 36},
    "gpt2-xl": {"emb_dim": 1600, "num_heads": 25, "num_layers": 48},
}

# How tokens are drawn by default: by `gpt generate`, by the page (gpt/share/page.html), in the samples of a
# run, and by Ollama.
USUAL_TEMPERATURE = 0.8
USUAL_TOP_K = 50

_KINDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false"}
_LARGEST = 1 << 28  # keeps every tensor's size below 64 bits
_LARGE_MASK = 1 << 28  # bytes, at 16,384 tokens; a larger mask must be no larger than the weights
_MOST_LAYERS = 10_000  # each layer's Python object takes memory, even without weights


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The architecture of a GPT, by default GPT-2 small's; InputError for values that cannot be used."""

    vocab_size: int = 50257
    """Tokens in the vocabulary. Their ids are 0 to vocab_size - 1."""
    context_length: int = 1024
    """The most tokens in one sequence, each with a position embedding. Elsewhere: block_size."""
    emb_dim: int = 768
    """Width of the residual stream. Elsewhere: n_embd."""
    num_heads: int = 12
    """Attention heads per block, each emb_dim / num_heads wide. Elsewhere: n_head."""
    num_layers: int = 12
    """Transformer blocks. Elsewhere: n_layer."""
    dropout: float = 0.0
    """Probability of dropping an entry of an embedding, attention weight or residual during training.
    Elsewhere: dropout."""
    window_dropout: bool = False
    """Whether dropout drops a feature in a whole window, from the embeddings and from what a layer adds to
    the residual stream, and no attention weights. On a CPU it takes hardly any time. Rare."""
    qkv_bias: bool = True
    """Whether the query, key and value projections have a bias, as GPT-2's have. Rare. Elsewhere: bias."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding's matrix, as in GPT-2. Rare."""
    exact_gelu: bool = False
    """Whether the GELU is computed exactly; GPT-2 approximates it with a tanh. Rare."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not _is_of_kind(value, field.type):
                raise InputError(f"{field.name} must be {_KINDS[field.type]}, got {shown(value)}")
            most = _MOST_LAYERS if field.name == "num_layers" else _LARGEST
            if field.type is int and not 1 <= value <= most:
                limit = "at least 1" if value < 1 else f"at most {most}"
                raise InputError(f"{field.name} must be {limit}, got {value}")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.emb_dim % self.num_heads:
            raise InputError(f"emb_dim {self.emb_dim} is not divisible by num_heads {self.num_heads}")
        weights = self.vocab_size + self.context_length + 12 * self.num_layers * self.emb_dim
        if self.context_length**2 > max(_LARGE_MASK, 4 * self.emb_dim * weights):
            raise InputError(f"context_length {self.context_length} needs a mask larger than the weights")
        for field in fields(self):  # NumPy's numbers become plain ones, for JSON
            kind = field.type
            assert isinstance(kind, type)
            object.__setattr__(self, field.name, kind(getattr(self, field.name)))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that `from_name` takes."""
        return tuple(_SIZES)

    @classmethod
    def from_name(cls, name: str, **changes: float) -> "GPTConfig":
        """Return a named size, with changes: `GPTConfig.from_name("gpt2-xl", context_length=256)`."""
        if name not in _SIZES:
            raise InputError(f"unknown model size {name!r}, expected one of {', '.join(_SIZES)}")
        return cls.from_dict({**_SIZES[name], **changes})

    @classmethod
    def from_dict(cls, values: JsonObject) -> "GPTConfig":
        """Build a config from what `to_dict` returned; InputError for an unknown field."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, values.keys() - known)):
            raise InputError(f"unknown model setting {', '.join(unknown)}, expected {', '.join(known)}")
        return cls(**values)

    def with_dropout_of(self, other: "GPTConfig") -> "GPTConfig":
        """Return this architecture with the dropout of another one."""
        return replace(self, dropout=other.dropout, window_dropout=other.window_dropout)

    def to_dict(self) -> JsonObject:
        """Return the fields as plain values, for JSON and checkpoints."""
        return asdict(self)


def _is_of_kind(value: object, kind: object) -> bool:
    """Whether a value, also one of NumPy, can stand for an int, a float or a bool."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, Integral if kind is int else Real)
