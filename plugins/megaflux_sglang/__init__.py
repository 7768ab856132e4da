"""MegaFlux-serve in SGLang: ``--moe-a2a-backend megaflux --moe-runner-backend megaflux`` on an unpatched release.

Decides what is hooked into SGLang and when. Holds no algorithm: each module translates one of SGLang's concepts to the
core's, and ``megaflux_serve.layer.ReplicatedMoE`` does the work.

SGLang calls ``register`` through its entry point group ``sglang.srt.plugins`` in the launcher and in every scheduler,
and then applies the hooks that it registered. SGLang only logs a hook that fails, so every layer checks that all are in
place before it is built.
"""

from __future__ import annotations


def register() -> None:
    """Offer the backend to SGLang; touches no device and changes nothing for other backends."""
    import logging

    from megaflux_sglang import backend, capture, checks, failures, layer, metrics, versions, weights

    version = versions.engine_version()
    if not versions.is_supported(version):
        # Refusing here would break servers that never asked for this backend; without hooks SGLang refuses its name.
        logging.getLogger("sglang.megaflux").warning("%s", versions.refusal(version))
        return
    backend.accept()
    hooks = (*checks.hooks(), *layer.HOOKS, *weights.hooks(), *failures.HOOKS, *metrics.hooks(), *capture.hooks())
    for target, hook, kind in hooks:
        versions.hook(target, hook, kind)


__all__ = ["register"]
