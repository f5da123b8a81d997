"""Loops of machine code: basic blocks, dominators, natural loops, and the path of one iteration."""

import re
from dataclasses import dataclass

HEX = re.compile(r"0x[0-9a-f]+")
ENDS_BLOCK = {"BRA", "EXIT", "RET", "BSYNC", "BRX", "JMP", "JMX"}


@dataclass
class Block:
    instructions: list
    successors: list


def last_hex(operands):
    found = HEX.findall(operands)
    return int(found[-1], 16) if found else None


def reconvergence_points(instructions):
    """{(address of a BSYNC): where it goes on}: the target of the nearest BSSY before it that names its barrier."""
    armed, points = {}, {}
    for i in instructions:
        if i.name == "BSSY":
            armed[i.operands.split(",")[0].strip()] = last_hex(i.operands)
        elif i.name == "BSYNC":
            points[i.address] = armed.get(i.operands.strip())
    return points


def jumps(instruction, following, reconverge):
    """Addresses that control goes to after an instruction that ends a block."""
    conditional = instruction.guard not in ("", "@PT")
    if instruction.name in ("BRA", "JMP"):
        # Taken only by warps that have diverged where the source promises convergence: a slow path aside.
        if instruction.opcode.startswith("BRA.DIV"):
            return [following]
        target = last_hex(instruction.operands)
        conditional = conditional or "," in instruction.operands  # BRA.U UP0, 0x100
        return [target, following] if conditional else [target]
    if instruction.name == "BSYNC":
        target = reconverge.get(instruction.address)
        return [following] if target is None else [target]
    if instruction.name in ("EXIT", "RET"):
        return [following] if conditional else []
    return [following]


def basic_blocks(instructions):
    """Blocks in the order of addresses; the first is the entry."""
    if not instructions:
        return []
    reconverge = reconvergence_points(instructions)
    following = {a.address: b.address for a, b in zip(instructions, instructions[1:])}
    goes_to = {
        i.address: [t for t in jumps(i, following.get(i.address), reconverge) if t is not None]
        for i in instructions
        if i.name in ENDS_BLOCK
    }
    leaders = {instructions[0].address} | {t for targets in goes_to.values() for t in targets}
    leaders |= {following[a] for a in goes_to if a in following}

    blocks, number = [], {}
    for i in instructions:
        if i.address in leaders:
            number[i.address] = len(blocks)
            blocks.append(Block([], []))
        blocks[-1].instructions.append(i)
    for block in blocks:
        last = block.instructions[-1].address
        targets = goes_to.get(last, [following[last]] if last in following else [])
        # A target that is padding (dropped from the listing) leads nowhere.
        block.successors = sorted({number[t] for t in targets if t in number})
    return blocks


def reverse_postorder(blocks):
    order, seen, stack = [], {0}, [(0, iter(blocks[0].successors))]
    while stack:
        node, successors = stack[-1]
        following = next((s for s in successors if s not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].successors)))
    return order[::-1]


def predecessors_of(blocks, reachable):
    predecessors = {node: [] for node in reachable}
    for node in reachable:
        for successor in blocks[node].successors:
            predecessors[successor].append(node)
    return predecessors


def immediate_dominators(order, predecessors):
    """Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm."""
    position = {node: i for i, node in enumerate(order)}
    dominator = {order[0]: order[0]}

    def common(a, b):
        while a != b:
            while position[a] > position[b]:
                a = dominator[a]
            while position[b] > position[a]:
                b = dominator[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            known = [p for p in predecessors[node] if p in dominator]
            best = known[0]
            for p in known[1:]:
                best = common(best, p)
            if dominator.get(node) != best:
                dominator[node] = best
                changed = True
    return dominator


class ControlFlow:
    """Blocks, dominators and natural loops of a kernel. Blocks are numbers."""

    def __init__(self, instructions):
        self.blocks = basic_blocks(instructions)
        self.loops = {}  # header: blocks of the loop, with the header
        self._back_edges = set()
        if not self.blocks:
            return
        order = reverse_postorder(self.blocks)
        predecessors = predecessors_of(self.blocks, order)
        self._dominator = immediate_dominators(order, predecessors)
        for node in order:
            for header in self.blocks[node].successors:
                if self._dominates(header, node):
                    self._back_edges.add((node, header))
                    body = self.loops.setdefault(header, {header})
                    pending = [node]
                    while pending:
                        inside = pending.pop()
                        if inside not in body:
                            body.add(inside)
                            pending += predecessors[inside]

    def _dominates(self, a, b):
        while b != a and b != self._dominator[b]:
            b = self._dominator[b]
        return a == b

    def instructions_of(self, body):
        return [i for node in sorted(body) for i in self.blocks[node].instructions]

    def smallest_loops(self, holds):
        """Headers of the loops of whose instructions one satisfies `holds`, without those that only contain one."""
        chosen = {h: body for h, body in self.loops.items() if any(map(holds, self.instructions_of(body)))}
        return sorted(
            h
            for h, body in chosen.items()
            if not any(other != h and other in body and chosen[other] < body for other in chosen)
        )

    def heaviest_path(self, header, weight):
        """The instructions of the way through the loop of `header` (through the kernel when None) that has the largest
        sum of `weight`, and of those the fewest instructions. Inner loops are passed once."""
        if not self.blocks:
            return []
        body = self.loops[header] if header is not None else set(range(len(self.blocks)))
        best, entered = {}, set()

        def ahead(node):
            return [s for s in self.blocks[node].successors if s in body and (node, s) not in self._back_edges]

        def is_end(node):
            successors = self.blocks[node].successors
            return header in successors if header is not None else not successors

        stack = [header if header is not None else 0]
        while stack:
            node = stack[-1]
            entered.add(node)
            pending = [s for s in ahead(node) if s not in best and s not in entered]
            if pending:
                stack += pending
                continue
            stack.pop()
            instructions = self.blocks[node].instructions
            ways = [best[s] for s in ahead(node) if best.get(s)] + ([(0, 0, None)] if is_end(node) else [])
            best[node] = None
            if ways:
                value, length, following = max(ways, key=lambda way: (way[0], way[1]))
                own = sum(map(weight, instructions))
                best[node] = (value + own, length - len(instructions), (node, following))
        path, link = [], best[header if header is not None else 0]
        link = link[2] if link else None
        while link:
            path += self.blocks[link[0]].instructions
            link = link[1]
        return path
