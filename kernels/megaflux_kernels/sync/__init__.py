"""Flags between thread blocks and between ranks: bounded waits and the error record.

``device.py`` holds what kernels call (needs the DSL), ``record.py`` what the host makes of an error record (does not).

The protocol is the same everywhere. A flag is one int32 that only grows: it holds the number of the launch (*epoch*,
from 1) that its writer has completed, is never reset, and is written with release and read with acquire order, at
``sys`` scope across ranks and ``gpu`` scope within one. A wait ends after a given number of nanoseconds; the first
wait that fails writes (wait code, rank, slot, epoch) into its rank's error record, and the kernel runs to its end. From
then on the rank tells its peers nothing and waits for none. Epochs are compared by their difference modulo 2**32.

``tests/kernels/test_protocol_model.py`` is the protocol as a model, every state of which is visited.
"""
