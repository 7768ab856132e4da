"""Demand: how many tokens every trajectory of a sealed window sends to every expert of every MoE layer.

Decides what a valid window is (RoutePack Eq. 1) and counts it. Knows no ranks, placements or schedules. Experts are
logical ids, dense layers are left out, and the layer axis is the order of the MoE layers.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaflux_serve.errors import InputError, read_from
from megaflux_serve.routepack.compiled import compiled

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Demand:
    """One sealed optimizer window.

    Attributes:
        counts: int32 [N, L, E], a_{i,l,e}: routed rows of trajectory i at expert e of MoE layer l.
        lengths: int64 [N], t_i: tokens of the trajectory as training packs it, at least 1.

    Build it with ``Demand.of``, which checks both.
    """

    counts: Int32Array
    lengths: Int64Array

    @classmethod
    def of(cls, counts: ArrayLike, lengths: ArrayLike) -> Demand:
        """Check and convert a window.

        Args:
            counts: whole numbers [N, L, E]; floats are taken when they hold whole numbers.
            lengths: whole numbers [N], at least 1.

        Raises:
            InputError: naming the array and the first offending entry: a wrong shape, NaN or a fraction, a negative
                count, a count above the trajectory's length (a token selects an expert at most once), or a trajectory
                whose layers hold different totals (each of its tokens selects as many experts in every layer).
        """
        tokens = _whole_numbers(lengths, "lengths", 1).astype(np.int64, copy=False)
        table = _whole_numbers(counts, "demand", 3)
        if table.shape[0] != tokens.shape[0]:
            raise InputError("demand", f"has {table.shape[0]} trajectories", f"{tokens.shape[0]}, as lengths has")
        if 0 in table.shape:
            raise InputError("demand", f"has shape {table.shape}", "[N, L, E], each at least 1")
        if tokens.min() < 1:
            i = int(tokens.argmin())
            raise InputError("lengths", f"trajectory {i} has {tokens[i]} tokens", "at least 1")
        if table.min() < 0:
            i, layer, e = _first(table < 0)
            raise InputError(
                "demand", f"is {table[i, layer, e]} at trajectory {i}, layer {layer}, expert {e}", "0 or more"
            )
        above = table.max(axis=(1, 2)) > tokens
        if above.any():
            i = int(above.argmax())
            raise InputError(
                "demand",
                f"sends {table[i].max()} rows of trajectory {i} to one expert",
                f"its {tokens[i]} tokens at most",
            )
        totals = table.sum(axis=2, dtype=np.int64)
        uneven = (totals != totals[:, :1]).any(axis=1)
        if uneven.any():
            i = int(uneven.argmax())
            raise InputError(
                "demand",
                f"trajectory {i} routes {totals[i].min()} rows in one layer and {totals[i].max()} in another",
                "the same total in every layer",
            )
        return cls(np.ascontiguousarray(table, dtype=np.int32), tokens)

    @classmethod
    def from_routes(cls, experts: NDArray[Any], offsets: ArrayLike, num_experts: int) -> Demand:
        """Count the routes of a window.

        Args:
            experts: integers [tokens, L, k], selected logical experts; a token whose ids are all -1 is filler and is
                dropped.
            offsets: [N + 1]; trajectory i is rows ``offsets[i]:offsets[i + 1]`` and its length is that many tokens.
            num_experts: logical experts E of a layer.

        Raises:
            InputError: wrong shapes, offsets that do not tile the rows, ids out of range, an expert twice in a token.
        """
        bounds = _whole_numbers(offsets, "offsets", 1).astype(np.int64, copy=False)
        if experts.ndim != 3 or experts.dtype.kind not in "iu" or 0 in experts.shape[1:]:
            raise InputError(
                "experts", f"is {experts.dtype} {experts.shape}", "integers [tokens, L, k], L and k above 0"
            )
        if bounds.size < 2 or bounds[0] != 0 or bounds[-1] != len(experts) or (np.diff(bounds) < 1).any():
            raise InputError("offsets", f"go from {bounds[:1]} to {bounds[-1:]}", f"0 to {len(experts)}, rising")
        real = (experts >= 0).all(axis=2)
        if not (real | (experts == -1).all(axis=2)).all():
            raise InputError("experts", "a token has some ids and some -1", "k ids or k times -1")
        if experts.max() >= num_experts:
            raise InputError("experts", f"holds expert {experts.max()}", f"ids 0 to {num_experts - 1}")
        ordered = np.sort(experts, axis=2)
        repeated = real & (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
        if repeated.any():
            token, layer = _first(repeated)
            raise InputError(
                "experts", f"token {token}, layer {layer} is {experts[token, layer].tolist()}", "k distinct ids"
            )
        return cls.of(_count_routes(np.ascontiguousarray(experts), bounds, num_experts), np.diff(bounds))

    @classmethod
    def load(cls, path: Path) -> Demand:
        """Read a window from an ``.npz`` file: ``counts`` and ``lengths``, or ``experts`` and ``offsets`` (routes).

        A folder is a replay store, whose newest sealed window is read, or the folder of one of its windows. Routes
        of a file count as many experts as their highest id needs, rounded up to a multiple of 8.

        Raises:
            InputError: the file is missing, damaged or holds neither pair, or its arrays break ``of`` or
                ``from_routes``.
            ConfigError: the store has no sealed window.
        """
        if path.is_dir():
            from megaflux_serve.capture.window import window_demand  # loads a codec, which files do without

            return cls.of(*window_demand(path))
        if not (path.is_file() and zipfile.is_zipfile(path)):
            raise InputError(str(path), "is no .npz file", "an .npz file of a window")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = {
                    name: arrays[name] for name in ("counts", "lengths", "experts", "offsets") if name in arrays.files
                }
        except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(str(path), f"cannot be read ({error})", "an .npz file without pickled objects") from error
        with read_from(path):
            if {"counts", "lengths"} <= found.keys():
                return cls.of(found["counts"], found["lengths"])
            if {"experts", "offsets"} <= found.keys():
                experts = found["experts"]
                highest = int(experts.max(initial=0)) if experts.dtype.kind in "iu" else 0  # else refused by name
                return cls.from_routes(experts, found["offsets"], -(-(highest + 1) // 8) * 8)
        raise InputError(str(path), f"holds {sorted(found)}", "counts and lengths, or experts and offsets")

    @property
    def num_trajectories(self) -> int:
        """N."""
        return int(self.counts.shape[0])

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """E, logical experts of a layer."""
        return int(self.counts.shape[2])

    def expert_loads(self) -> Int64Array:
        """int64 [L, E]: L_{l,e}, the window's rows at every expert (section 3.2)."""
        return np.asarray(self.counts.sum(axis=0, dtype=np.int64))

    def rank_demand(self, owner: Int32Array, num_ranks: int) -> Int32Array:
        """int32 [N, P, L]: q_{i,l,p} of Eq. 6 with the layer axis last, as the search reads it.

        Args:
            owner: int32 [L, E], the EP rank that owns each expert.
            num_ranks: EP ranks P.
        """
        return _rank_demand(self.counts, owner, num_ranks)

    def select(self, trajectories: ArrayLike) -> Demand:
        """The window that holds only these trajectories, in this order."""
        index = np.asarray(trajectories, dtype=np.int64)
        return Demand(np.ascontiguousarray(self.counts[index]), self.lengths[index])


def _whole_numbers(values: ArrayLike, source: str, ndim: int) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != ndim:
        raise InputError(source, f"has shape {array.shape}", f"{ndim} dimension{'s' * (ndim > 1)}")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise InputError(
                source, f"is {array[_first(~np.isfinite(array))]} at {_first(~np.isfinite(array))}", "finite numbers"
            )
        if (array != np.floor(array)).any():
            raise InputError(source, "holds fractions", "whole numbers")
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise InputError(source, f"has dtype {array.dtype}", "integers, or floats that hold whole numbers")
    if array.size and int(array.max()) > np.iinfo(np.int32).max:
        raise InputError(source, f"holds {array.max()}", "numbers below 2**31")
    return array


def _first(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])


@compiled
def _count_routes(experts: NDArray[Any], offsets: Int64Array, num_experts: int) -> Int32Array:
    _, num_layers, top_k = experts.shape
    counts = np.zeros((offsets.size - 1, num_layers, num_experts), dtype=np.int32)
    for i in range(offsets.size - 1):
        for token in range(offsets[i], offsets[i + 1]):
            for layer in range(num_layers):
                for k in range(top_k):
                    if experts[token, layer, k] >= 0:
                        counts[i, layer, experts[token, layer, k]] += 1
    return counts


@compiled
def _rank_demand(counts: Int32Array, owner: Int32Array, num_ranks: int) -> Int32Array:
    num_trajectories, num_layers, num_experts = counts.shape
    demand = np.zeros((num_trajectories, num_ranks, num_layers), dtype=np.int32)
    for i in range(num_trajectories):
        for layer in range(num_layers):
            for e in range(num_experts):
                demand[i, owner[layer, e], layer] += counts[i, layer, e]
    return demand
