"""A user's JSON schema as one that llguidance compiles and that admits exactly the same JSON.

llguidance refuses what it does not implement, which is right for assertions and needless for the rest. Here the rest
goes: annotations, assertions that hold by definition, and a few assertions that have an exact equal among those that it
does implement. Nothing is ever weakened: what has no exact equal stays as it is, and is refused by name.

The rules are those of JSON Schema 2020-12 (Core and Validation) and its predecessors back to draft 4.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

Schema = dict[str, Any] | bool

# What llguidance enforces. Any other format is an annotation by the standard (Validation, 7.2.1), as all would be.
ENFORCED_FORMATS: Final = frozenset(
    ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
_FREE_FORMAT: Final = "unknown"  # llguidance's own name for any text; nobody else's

# White space as any printer writes it: one line break between two tokens at most, and an indentation. Without a bound a
# model may fill its whole answer with white space and never break the grammar.
OPTIONS: Final = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t]{0,4}(\r?\n[ \t]{0,64})?"}

_ONE: Final = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS: Final = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_ANNOTATIONS: Final = frozenset(
    ("$comment", "title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated")
)
_TYPES: Final = ("null", "boolean", "number", "string", "array", "object")


def enforceable(schema: Schema) -> dict[str, Any]:
    """The schema to compile, with `OPTIONS` for llguidance in it; the argument is not changed.

    Args:
        schema: a JSON value that is an object or a boolean, not nested more deeply than Python can recurse.
    """
    plain = _plain(schema)
    if isinstance(plain, bool):
        plain = {} if plain else {"not": {}}
    # It replaces the user's own, which could switch llguidance's enforcement off.
    return {**plain, "x-guidance": OPTIONS}


def _plain(schema: Any) -> Any:
    """One schema and all inside it. What is no schema is left to llguidance to refuse."""
    if not isinstance(schema, dict):
        return schema
    made = {key: _inner(key, value) for key, value in schema.items()}
    _drop_what_holds_anyway(made)
    if "$ref" not in made and isinstance(made.get("allOf", []), list):  # up to draft 7, siblings of $ref mean nothing
        _replace_by_equals(made)
    return made


def _inner(key: str, value: Any) -> Any:
    if key in _MAPS and isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [_plain(item) for item in value]
    return _plain(value) if key in _ONE else value


def _drop_what_holds_anyway(schema: dict[str, Any]) -> None:
    """Removes keywords that assert nothing where they stand."""
    if "$dynamicAnchor" in schema:  # without a $dynamicRef, which is refused, it is an anchor like any other
        schema.setdefault("$anchor", schema.pop("$dynamicAnchor"))
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    if "contains" not in schema:
        for key in ("minContains", "maxContains"):
            schema.pop(key, None)
    void: dict[str, Callable[[Any], bool]] = {
        "format": lambda name: isinstance(name, str) and (name not in ENFORCED_FORMATS),
        "uniqueItems": lambda unique: unique is False or (unique is True and _at_most_one(schema)),
        "unevaluatedItems": _admits_all,
        "unevaluatedProperties": _admits_all,
        "propertyNames": lambda names: _admits_all(names) or names == {"type": "string"},
        "dependencies": lambda entries: entries == {},
        "dependentRequired": lambda entries: entries == {},
        "dependentSchemas": lambda entries: entries == {},
        "$recursiveAnchor": lambda value: isinstance(value, bool),  # of no effect without $recursiveRef
    }
    for key, holds in void.items():
        if key in schema and holds(schema[key]):
            del schema[key]


def _at_most_one(schema: Mapping[str, Any]) -> bool:
    most = schema.get("maxItems")
    return isinstance(most, int | float) and most <= 1


def _admits_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not schema.keys() - _ANNOTATIONS)


def _replace_by_equals(schema: dict[str, Any]) -> None:
    """Puts dependencies and negations that have an exact equal into `allOf`."""
    equals: list[Any] = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        entries = schema.get(key)
        if isinstance(entries, dict) and all(map(_is_dependency, entries.values())):
            del schema[key]
            equals += [{"anyOf": [_without(name), _with(name, needs)]} for name, needs in entries.items()]
    if "not" in schema and (negated := _negation(schema["not"])) is not None:
        del schema["not"]
        if negated is not True:
            equals.append(negated)
    if equals:
        # At the end: references may count the others.
        schema["allOf"] = [*schema.get("allOf", ()), *equals]


def _is_dependency(needs: Any) -> bool:
    return isinstance(needs, dict | bool) or (isinstance(needs, list) and all(isinstance(name, str) for name in needs))


def _without(name: str) -> Schema:
    return {"properties": {name: False}}


def _with(name: str, needs: Any) -> Schema:
    return {"required": [name, *needs]} if isinstance(needs, list) else {"allOf": [{"required": [name]}, needs]}


def _negation(schema: Any) -> Any:
    """A schema that admits exactly what `schema` does not; None where we know none."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    parts = [_negated_keyword(key, value) for key, value in schema.items() if key not in _ANNOTATIONS]
    if any(part is None for part in parts):
        return None
    return _any_of(parts)


def _negated_keyword(key: str, value: Any) -> Any:
    match key, value:
        case "not", dict() | bool():
            return value
        case "type", str() | list():
            named = {value} if isinstance(value, str) else set(value)
            # The numbers that are no integers are not among what llguidance can say.
            if not named <= set(_TYPES) | {"integer"} or ("integer" in named and "number" not in named):
                return None
            rest = [name for name in _TYPES if name not in named]
            return {"type": rest} if rest else False
        case "required", list() if all(isinstance(name, str) for name in value):
            return {"type": "object", "anyOf": [_without(name) for name in value]} if value else False
        case "anyOf", list():
            negated = [_negation(option) for option in value]
            return None if None in negated else {"allOf": negated}
        case "allOf", list():
            negated = [_negation(option) for option in value]
            return None if None in negated else _any_of(negated)
    return None


def _any_of(options: list[Any]) -> Any:
    options = [option for option in options if option is not False]
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": options}
