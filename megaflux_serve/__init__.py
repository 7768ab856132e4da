"""MegaFlux-serve: replica-aware mixture-of-experts layers, and planning from routing replay. Two flows, nothing else::

    serving   hidden states + top-k ids/weights -> load histogram -> plan -> execute -> hidden states
                                                        |             |         |
                                                        +-- metrics <-+---------+
    RL        top-k ids per finished request -> replay store -> demand -> placement -> schedule -> training
                                                                              +-> slot migration -> engine

Each stage defines the value that it hands on and imports only the stages above it::

    errors, slots -> routing -> planning -> workspace -> executors -> layer      (serving)
                                            capture -> routepack -> migration    (RL)
                                                                    metrics, cli (edges)
"""

__version__ = "0.1.0"
