"""MegaFlux-serve in vLLM: ``--moe-backend megaflux`` on an unpatched release.

Decides whether this release gets the backend. Holds no algorithm: ``hooks`` lists what is changed in vLLM, each module
translates one of vLLM's concepts to the core's, and ``megaflux_serve.layer.ReplicatedMoE`` does the work.

vLLM calls ``register`` through its entry point group ``vllm.general_plugins`` in every process: front end, engine core,
worker and model inspection. So it imports nothing of vLLM; hooks wait for what each process imports by itself.
"""

from __future__ import annotations


def register() -> None:
    """Offer the backend to vLLM; may be called again, touches no device, and changes nothing for other backends.

    Raises:
        UnsupportedError: a hook did not take, so that the backend would be ignored. If vLLM imports later what the hook
            changes, that import raises it.
    """
    import logging

    from megaflux_vllm import hooks, versions

    version = versions.engine_version()
    if not versions.is_supported(version):
        # Refusing here would break servers that never asked for this backend; without the hooks vLLM refuses its name.
        logging.getLogger("vllm.megaflux").warning("%s", versions.refusal(version))
        return
    hooks.install()


__all__ = ["register"]
