"""Keys of config.json for rotary positions: those of transformers 5, and those that earlier readers know."""

from typing import Any

from ckpt_prune.model.skeleton import RefusedConfigError, parse_config, quiet_transformers

PARAMETERS, SCALING = "rope_parameters", "rope_scaling"
_THETA = {"gpt_neox": "rotary_emb_base", "modernbert": "global_rope_theta"}
_LOCAL_THETA = {"gemma3_text": "rope_local_base_freq", "modernbert": "local_rope_theta"}
_SHARE = {"gpt_neox": "rotary_pct"}
"""`model_type` → the older key, if it is not the usual one."""
OLDER_KEYS = frozenset({"rope_theta", *_THETA.values()})
"""Keys that say how fast positions turn, of which an output has one if its config states rotary positions."""
_EARLIER_KINDS = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}
"""Values of `rope_type` that transformers 4.57 knows."""
_LONGROPE = ("short_factor", "long_factor")


def state_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that says how positions are rotated in both ways, if it says so in one.

    transformers 4.57 does not read `rope_parameters`: without `rope_theta` it takes its class's default, and says
    nothing. Configs inside the config are treated alike. Older keys by which transformers 5 would read other values
    than it does without them are left out.
    """
    stated = {
        key: state_rope(value) if isinstance(value, dict) and "model_type" in value else value
        for key, value in config.items()
    }
    parameters = _read(stated)
    if not parameters:
        return stated
    older = _older_keys(str(stated["model_type"]), parameters)
    given = {key: value for key, value in stated.items() if value is not None}
    if not given.keys() & {PARAMETERS, *older}:
        return stated  # it leaves positions to the class's defaults
    both = stated | {PARAMETERS: parameters} | older | given
    return both if _comparable(_read(both)) == _comparable(parameters) else stated


def _read(config: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers reads; empty without rotary positions, or if it refuses the config."""
    if "model_type" not in config:
        return {}
    try:
        with quiet_transformers():
            return getattr(parse_config(config), PARAMETERS, None) or {}
    except RefusedConfigError:
        return {}


def _comparable(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without the older word for `rope_type`."""
    return {
        key: _comparable(value) if isinstance(value, dict) else value
        for key, value in parameters.items()
        if key != "type"
    }


def _older_keys(model_type: str, parameters: dict[str, Any]) -> dict[str, Any]:
    full = parameters.get("full_attention", parameters)
    if not isinstance(full, dict) or full.get("rope_theta") is None:
        return {}
    kind = full.get("type") or full.get("rope_type", "default")
    if kind not in _EARLIER_KINDS:
        return {}
    keys = {_THETA.get(model_type, "rope_theta"): full["rope_theta"]}
    local = parameters.get("sliding_attention")
    if isinstance(local, dict) and model_type in _LOCAL_THETA:
        keys[_LOCAL_THETA[model_type]] = local["rope_theta"]
    scaling = dict(full)
    del scaling["rope_theta"]
    share = scaling.pop("partial_rotary_factor", None)
    if share is not None:
        keys[_SHARE.get(model_type, "partial_rotary_factor")] = share
    scaling.pop("type", None)
    if kind == "longrope" and model_type == "phi3":  # its class takes these three keys and no other
        keys[SCALING] = {"type": kind} | {key: scaling[key] for key in _LONGROPE}
    elif kind != "default" or scaling.keys() - {"rope_type"}:
        keys[SCALING] = scaling
    return keys
