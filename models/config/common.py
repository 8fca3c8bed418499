"""What the families' configurations share: the error, checked access to the fields of a config.json, and rope."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

INT32_MAX = 2**31 - 1
FLOAT32_TINY, FLOAT32_MAX = 2.0**-126, (2 - 2**-23) * 2.0**127
LAYERS_MAX, EXPERTS_MAX = 1024, 4096  # names and shapes are listed one by one
WIDTH_MAX = 1 << 16  # values of a cached row, whose pages are counted in int32
SHOWN = 200  # characters of a value in a message


class ConfigError(ValueError):
    """A configuration that cannot be run. The message names the field, its value and what is supported."""


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary frequencies (Peng et al. 2023).

    Attributes:
        factor: how much longer than the original the context is.
        beta_fast: turns within the original context from which a frequency is kept.
        beta_slow: turns up to which a frequency is slowed by the whole factor.
        original_max_position_embeddings: the context that the frequencies were trained for.
        mscale: attention magnitude for cosines and sines; None where the family has none.
        mscale_all_dim: attention magnitude for the softmax scale; None where the family has none.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    mscale: float | None
    mscale_all_dim: float | None


def shown(value: Any) -> str:
    """``repr`` for messages, on one line and cut where it is long."""
    try:
        text = " ".join(repr(value).splitlines())
    except (ValueError, RecursionError):  # more digits than Python writes out, or more levels
        text = f"<{type(value).__name__}, too long to show>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def unsupported(field: str, value: Any, supported: str) -> ConfigError:
    """The error of a field whose value is known to be wrong."""
    return ConfigError(f"Expected {field}={shown(value)} to be {supported}")


def one_of(value: Any, supported: Collection[Any]) -> bool:
    """Whether a value is one of ``supported``, its type included: ``True`` and ``1.0`` are not 1."""
    return any(type(value) is type(s) and value == s for s in supported)


class Fields:
    """Checked access to the fields of a config.json. Absent and null fields are the same thing.

    Args:
        values: the parsed object.
        aliases: other names of a field, by its name here: those of other dialects.
    """

    def __init__(
        self, values: Mapping[str, Any], aliases: Mapping[str, tuple[str, ...]] | None = None, where: str = ""
    ):
        self.values = values
        self.aliases = aliases or {}
        self.where = where

    def find(self, name: str) -> tuple[str, Any]:
        """The name under which a field stands here, and its value; None if it stands under none.

        Raises:
            ConfigError: two of its names stand here with different values.
        """
        found = [
            (key, self.values[key]) for key in (name, *self.aliases.get(name, ())) if self.values.get(key) is not None
        ]
        for key, value in found[1:]:
            if value != found[0][1]:
                raise unsupported(self.where + key, value, f"equal to {self.where}{found[0][0]}={shown(found[0][1])}")
        key, value = found[0] if found else (name, None)
        return self.where + key, value

    def has(self, name: str) -> bool:
        return self.find(name)[1] is not None

    def get(self, name: str, kind: type | tuple[type, ...], described: str, default: Any = ...) -> Any:
        """A field of a type; without a default it is required."""
        key, value = self.find(name)
        if value is None:
            if default is ...:
                names = " or ".join((self.where + name, *self.aliases.get(name, ())))
                raise ConfigError(f"Expected the configuration to have {names}: {described}; it is absent or null")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise unsupported(key, value, described)
        return value

    def integer(self, name: str, default: Any = ..., *, low: int = 1, high: int = INT32_MAX) -> int:
        """An integer in ``low..high``."""
        described = f"an integer in {low}..{high}"
        value = self.get(name, int, described, default)
        if value is not default and not low <= value <= high:
            raise unsupported(self.find(name)[0], value, described)
        return value

    def number(
        self, name: str, default: Any = ..., *, low: float = 0.0, high: float = FLOAT32_MAX, closed: bool = False
    ) -> float:
        """A number above ``low``, or at least that if ``closed``, and at most ``high``; in float32 what it is here."""
        described = f"a float32 number {'of at least' if closed else 'above'} {low:g} and at most {high:g}"
        value = self.get(name, (int, float), described, default)
        if value is default:
            return value
        vanishes = 0 < abs(value) < FLOAT32_TINY
        if not low <= value <= high or (value == low and not closed) or vanishes:  # NaN is in no range
            raise unsupported(self.find(name)[0], value, described)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return self.get(name, bool, "true or false", default)

    def choice(self, name: str, supported: Collection[Any], default: Any = ...) -> Any:
        """A field that must have one of the ``supported`` values."""
        described = (
            f"one of {', '.join(repr(s) for s in supported)}" if len(supported) > 1 else f"{next(iter(supported))!r}"
        )
        value = self.get(name, (str, int, float, bool), described, default)
        if value is not default and not one_of(value, supported):
            raise unsupported(self.find(name)[0], value, described)
        return value

    def absent(self, name: str, reason: str) -> None:
        """Refuses a field that is there, with a value other than zero, false or empty."""
        key, value = self.find(name)
        if value:
            raise ConfigError(f"Expected no {key}={shown(value)}: {reason}")

    def items(self, name: str, supported: Collection[Any], length: int) -> tuple[Any, ...]:
        """A list of ``length`` entries, each one of ``supported``."""
        value = self.get(name, (list, tuple), f"a list of {length} entries")
        key = self.find(name)[0]
        if len(value) != length:
            raise ConfigError(f"Expected {key} to have {length} entries, one a layer, got {len(value)}")
        for i, entry in enumerate(value):
            if not one_of(entry, supported):
                raise unsupported(f"{key}[{i}]", entry, f"one of {', '.join(repr(s) for s in supported)}")
        return tuple(value)

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None."""
        value = self.get(name, Mapping, "an object", None)
        return None if value is None else Fields(value, where=f"{self.find(name)[0]}.")

    def token(self, name: str, vocab_size: int = INT32_MAX) -> int | None:
        """A token id below ``vocab_size``; -1 is none."""
        value = self.integer(name, None, low=-1, high=vocab_size - 1)
        return None if value == -1 else value

    def tokens(self, name: str, vocab_size: int = INT32_MAX) -> tuple[int, ...]:
        """One token id below ``vocab_size`` or a list of them."""
        key, value = self.find(name)
        ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise unsupported(key, value, f"a token id or a list of token ids in 0..{vocab_size - 1}")
        return ids


def read_dtype(fields: Fields) -> str:
    """The dtype that the checkpoint declares, "bfloat16" if it declares none."""
    value = fields.get("torch_dtype", str, "the name of a dtype", "bfloat16").removeprefix("torch.")
    if value not in ("bfloat16", "float16", "float32"):
        raise unsupported("torch_dtype", value, "one of 'bfloat16', 'float16', 'float32'")
    return value


def read_yarn(rope: Fields | None, outer: Fields) -> Yarn | None:
    """The scaling that a ``rope_scaling`` or ``rope_parameters`` object describes; None for none.

    Args:
        rope: the object.
        outer: the configuration around it, where the original context may stand instead.
    """
    if rope is None:
        return None
    named = Fields(rope.values, {"rope_type": ("type",)}, rope.where)
    kind = named.choice("rope_type", ("default", "yarn"), "default")
    scaling = [key for key in ("factor", "beta_fast", "beta_slow") if rope.has(key)]
    if kind == "default":
        if scaling and not named.has("rope_type"):
            raise ConfigError(f"Expected {rope.where}{scaling[0]} to come with a rope_type; supported: 'yarn'")
        return None
    if not rope.flag("truncate", True):
        raise unsupported(f"{rope.where}truncate", False, "true")
    rope.choice("attention_factor", (1, 1.0), 1.0)
    holder = rope if rope.has("original_max_position_embeddings") else outer
    yarn = Yarn(
        factor=rope.number("factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        original_max_position_embeddings=holder.integer("original_max_position_embeddings"),
        mscale=rope.number("mscale", None),
        mscale_all_dim=rope.number("mscale_all_dim", None),
    )
    if yarn.factor < 1:
        raise unsupported(f"{rope.where}factor", yarn.factor, "at least 1")
    if yarn.beta_fast <= yarn.beta_slow:
        raise unsupported(f"{rope.where}beta_fast", yarn.beta_fast, f"above beta_slow={yarn.beta_slow}")
    return yarn


def read_theta(fields: Fields, name: str, *sections: Fields | None) -> float:
    """A rope base that stands in one of ``sections`` as ``rope_theta``, at the top as ``name``, or in both alike."""
    inner = [s.number("rope_theta", low=1) for s in sections if s is not None and s.has("rope_theta")]
    outer = fields.number(name, None, low=1) if inner else fields.number(name, low=1)
    if inner and outer is not None and outer != inner[0]:
        raise unsupported(fields.find(name)[0], outer, f"equal to rope_theta={inner[0]} of the rope parameters")
    return inner[0] if inner else outer


def check_common(fields: Fields) -> None:
    """Refuses what no family here has."""
    fields.choice("hidden_act", ("silu",), "silu")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise unsupported(name, True, "false: projections have no biases here")
    if fields.flag("tie_word_embeddings", False):
        raise unsupported("tie_word_embeddings", True, "false: embedding and output head are separate tensors")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")


def check_even(name: str, value: int) -> None:
    if value % 2:
        raise unsupported(name, value, "even: rotary embedding turns pairs")


def check_divides(name: str, value: int, other: str, whole: int) -> None:
    if whole % value:
        raise unsupported(name, value, f"a divisor of {other}={whole}")


def check_at_most(name: str, value: float, other: str, limit: float) -> None:
    if value > limit:
        raise unsupported(name, value, f"at most {other}={limit}")
