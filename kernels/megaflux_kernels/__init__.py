"""CuTe DSL kernels of MegaFlux-serve: a leaf that imports nothing of the core.

::

    layout.py     memory map of the symmetric workspace and wait codes; no DSL import
    language.py   releases of the kernel language that will do
    symmetric.py  allocates that map on real or virtual ranks
    sync/         flags, bounded waits and the error record, device and host side
    search.py     counts -> plan, one CTA a plan (MegaFlux section 3.1, appendix A)
    planner.py    top-k ids -> counts of all ranks -> plan -> routes, one launch a layer and batch
    routes.py     plan -> destination of every routed row and the work lists of the forward kernel
"""
