"""What must be equal before two evaluation results may be compared (D.0; users.md G1).

A protocol is a flat dict: dataset digest and split, template hash, few-shot ids, sampling, stop set, engine, verifier
version, seed. Its hash is stored with every sample set and every score. Two sets with different hashes are not
compared: the error names the fields that differ and what to run.
"""

from __future__ import annotations

from collections.abc import Mapping

from stages.spec import ConfigError, module_file
from storage.files import canonical_json, sha256_text

GRADERS = ("stages.rewards", "stages.verifiers", "stages.sandbox")


class ProtocolError(ConfigError):
    """Two evaluations were made under different protocols, so their numbers do not compare."""


def protocol_hash(protocol: Mapping) -> str:
    """16 hex digits over the canonical JSON of the protocol."""
    return sha256_text(canonical_json(dict(protocol)))[:16]


def grader_version() -> str:
    """Digest of the sources that turn an answer into a verdict: a changed parser is another protocol."""
    files = [file for name in GRADERS if (file := module_file(name)) is not None]
    return sha256_text("\n".join(file.read_text(encoding="utf-8") for file in files))[:12]


def differences(a: Mapping, b: Mapping) -> dict[str, tuple]:
    """{field: (value in a, value in b)} of the fields that differ."""
    return {name: (a.get(name), b.get(name)) for name in sorted(set(a) | set(b)) if a.get(name) != b.get(name)}


def require_same(evaluations: Mapping[str, Mapping], *, what: str = "protocol") -> None:
    """Raise :class:`ProtocolError` unless all named protocols are equal."""
    items = list(evaluations.items())
    for name, protocol in items[1:]:
        differing = differences(items[0][1], protocol)
        if differing:
            fields = "; ".join(f"{field}: {a!r} for {items[0][0]}, {b!r} for {name}" for field, (a, b) in differing.items())
            raise ProtocolError(
                f"{items[0][0]} and {name} were evaluated under different {what}s ({fields}). "
                "Scores are only compared on the same prompts, template and sampling: run the evaluate stage again for one "
                "of them with the other's prompts and settings."
            )
