"""The forward kernel's task words on the device: ``worklist.task_stream`` in closed form, one warp a group and product.

Decides nothing: the order and the words are those of ``worklist``, which says why. A *group* is at most
``group_blocks`` consecutive blocks of one slot. Prefix sums over slots (groups before a slot, FC1 and FC2 words
before it) lie in shared memory; everything about a group follows from them by a search over slots and a division.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from megaflux_kernels.slots import warp_prefix
from megaflux_kernels.worklist import CLUSTER, Kind, LayerShape, Tiling, group_words

arch = cute.arch


class TaskPrefix(NamedTuple):
    """Shared memory, int32 [slots + 1] each: exclusive prefix sums over the slots of a rank.

    ``blocks``, ``groups``, ``fc1`` and ``fc2`` words.
    """

    blocks: cute.Tensor
    groups: cute.Tensor
    fc1: cute.Tensor
    fc2: cute.Tensor


class Tasks:
    """Device code; one instance a layer shape and tiling."""

    def __init__(self, shape: LayerShape, tiling: Tiling) -> None:
        self.slots, self.group, self.lag = shape.slots, tiling.group_blocks, tiling.lag
        self.tiles = (tiling.fc1_tiles(shape), tiling.fc2_tiles(shape))
        self.full_words = tuple(group_words(self.group, tiles) for tiles in self.tiles)
        self.num_words = 4 * (self.slots + 1)

    def prefix_at(self, base) -> TaskPrefix:
        """Views of ``num_words`` words of shared memory."""
        width = self.slots + 1
        return TaskPrefix(*(cute.make_tensor(base + i * width, cute.make_layout(width)) for i in range(4)))

    @cute.jit
    def words_of(self, size: Int32, kind: cutlass.Constexpr):
        """Task words of one product of a group of ``size`` blocks: ``worklist.group_words``."""
        tiles = self.tiles[kind]
        return size // CLUSTER * tiles + size % CLUSTER * (-(-tiles // CLUSTER))

    @cute.jit
    def sum_slots(self, prefix: TaskPrefix, slot_blocks: cute.Tensor, lane: Int32):
        """Fill the prefix sums from the blocks of this rank's slots, by one warp."""
        blocks_before, groups_before, fc1_before, fc2_before = Int32(0), Int32(0), Int32(0), Int32(0)
        for base in cutlass.range(0, self.slots + 1, 32):
            slot, blocks = base + lane, Int32(0)
            if slot < self.slots:
                blocks = slot_blocks[slot]
            full, rest = blocks // self.group, blocks % self.group
            groups = full
            if rest > 0:
                groups += 1
            fc1 = full * self.full_words[Kind.FC1] + self.words_of(rest, Kind.FC1)
            fc2 = full * self.full_words[Kind.FC2] + self.words_of(rest, Kind.FC2)
            blocks_to, groups_to = blocks_before + warp_prefix(blocks, lane), groups_before + warp_prefix(groups, lane)
            fc1_to, fc2_to = fc1_before + warp_prefix(fc1, lane), fc2_before + warp_prefix(fc2, lane)
            if slot <= self.slots:
                prefix.blocks[slot] = blocks_to - blocks
                prefix.groups[slot] = groups_to - groups
                prefix.fc1[slot] = fc1_to - fc1
                prefix.fc2[slot] = fc2_to - fc2
            blocks_before, groups_before = arch.shuffle_sync(blocks_to, 31), arch.shuffle_sync(groups_to, 31)
            fc1_before, fc2_before = arch.shuffle_sync(fc1_to, 31), arch.shuffle_sync(fc2_to, 31)

    @cute.jit
    def last_at_most(self, sums: cute.Tensor, value: Int32):
        """The last slot, or ``slots``, whose prefix sum is at most ``value`` (at least 0): a binary search."""
        low, high = Int32(0), Int32(self.slots)
        while low < high:
            middle = (low + high + 1) // 2
            if sums[middle] <= value:
                low = middle
            else:
                high = middle - 1
        return low

    @cute.jit
    def fc1_end(self, prefix: TaskPrefix, group: Int32):
        """FC1 words up to the end of a group."""
        slot = self.last_at_most(prefix.groups, group)
        end = prefix.fc1[slot] + (group - prefix.groups[slot] + 1) * self.full_words[Kind.FC1]
        return cutlass.min(end, prefix.fc1[slot + 1])

    @cute.jit
    def groups_ended(self, prefix: TaskPrefix, position: Int32):
        """Groups whose FC1 ends at most ``position`` FC1 words into the stream; 0 for a negative position."""
        num = Int32(0)
        if position >= 0:
            slot = self.last_at_most(prefix.fc1, position)
            num = prefix.groups[slot]
            if slot < self.slots:
                num += (position - prefix.fc1[slot]) // self.full_words[Kind.FC1]
        return num

    @cute.jit
    def fc2_words_of_first(self, prefix: TaskPrefix, num: Int32):
        """FC2 words of the first ``num`` groups."""
        slot = self.last_at_most(prefix.groups, num)
        return prefix.fc2[slot] + (num - prefix.groups[slot]) * self.full_words[Kind.FC2]

    @cute.jit
    def start_of(self, prefix: TaskPrefix, group: Int32, kind: cutlass.Constexpr):
        """Position of the group's first word of a product in the stream."""
        end = self.fc1_end(prefix, group)
        start = Int32(0)
        if const_expr(kind == Kind.FC1):
            before = Int32(0)
            if group > 0:
                before = self.fc1_end(prefix, group - 1)
            done = self.groups_ended(prefix, before - self.lag)
            start = before + self.fc2_words_of_first(prefix, done)
        else:
            num_groups = prefix.groups[self.slots]
            after = self.groups_ended(prefix, end + self.lag - 1)  # the first group that ends at or beyond end + lag
            after = cutlass.min(after, num_groups - 1)
            start = self.fc1_end(prefix, after) + self.fc2_words_of_first(prefix, group)
        return start

    @cute.jit
    def write_group(
        self,
        prefix: TaskPrefix,
        tasks: cute.Tensor,
        group: Int32,
        kind: cutlass.Constexpr,
        arriving: Int32,
        home_slots: cutlass.Constexpr,
        lane: Int32,
    ):
        """All words of one product of a group, by one warp: ``worklist.group_word``.

        Args:
            prefix: prefix sums.
            tasks: int64 [max_tasks], written.
            group: index of the group.
            kind: FC1 or FC2.
            arriving: bit i: the weights of replica slot i arrive in this launch.
            home_slots: home slots of a rank.
            lane: lane.
        """
        tiles = self.tiles[kind]
        slot = self.last_at_most(prefix.groups, group)
        first = prefix.blocks[slot] + (group - prefix.groups[slot]) * self.group
        size = cutlass.min(Int32(self.group), prefix.blocks[slot + 1] - first)
        gated = Int32(0)
        if slot >= home_slots:
            gated = (arriving >> (slot - home_slots)) & 1
        start = self.start_of(prefix, group, kind)
        pairs, single = size // CLUSTER, size % CLUSTER
        for index in cutlass.range(lane, self.words_of(size, kind), 32):
            band = index // (pairs * CLUSTER + single)
            within = index - band * (pairs * CLUSTER + single)
            width = cutlass.min(Int32(CLUSTER), tiles - band * CLUSTER)
            pair = within // width
            tile, share = band * CLUSTER + within - pair * width, Int32(0)
            if pair >= pairs:
                pair, tile, share = pairs, band * CLUSTER, Int32(1)
            low = Int64(first + pair * CLUSTER) | (Int64(tile) << 24) | (Int64(slot) << 40)
            position = start + index
            tasks[position] = low | (Int64(int(kind)) << 56) | (Int64(share) << 58) | (Int64(gated) << 59)


__all__ = ["TaskPrefix", "Tasks"]
