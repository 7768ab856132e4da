"""MegaFlux-serve in vLLM: ``--moe-backend megaflux`` on an unpatched release.

Decides what is hooked into vLLM and when. Holds no algorithm: each module translates one of vLLM's concepts to the
core's, and ``megaflux_serve.layer.ReplicatedMoE`` does the work.

vLLM calls ``register`` through its entry point group ``vllm.general_plugins`` in every process: front end, engine core,
worker and model inspection.
"""

from __future__ import annotations


def register() -> None:
    """Offer the backend to vLLM; may be called again, touches no device, and changes nothing for other backends.

    Raises:
        UnsupportedError: a hook did not take, so that the backend would be ignored.
    """
    import logging

    from megaflux_vllm import backend_name, capture, checks, cpu_router, layer, metrics, versions

    version = versions.engine_version()
    if not versions.is_supported(version):
        # Refusing here would break servers that never asked for this backend; without the hooks vLLM refuses its name.
        logging.getLogger("vllm.megaflux").warning("%s", versions.refusal(version))
        return
    backend_name.accept()
    checks.check_before_weights_load()
    capture.install()
    metrics.install()
    layer.replace_routed_experts()
    cpu_router.provide_missing_operators()
    versions.check_hooks_took(version)


__all__ = ["register"]
