"""The reference policy of the KL behind an endpoint: `reference.Reference` with no weights here."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from base.inputs.teacher_server import KEY, Scores, ServerError, TeacherServer
from base.system.exits import StopRun
from base.system.ranks import gather, on_device
from config import GRPOConfig
from head import HeadOptions
from model import Decoder
from pack import MicroBatch


class ServedTeacher:
    """It has no shards to save, and follows nobody."""

    def __init__(self, server: TeacherServer):
        self.server = server
        self.shards: dict[str, Tensor] = {}

    def score(self, micros: Sequence[MicroBatch], model: Decoder, options: HeadOptions, top_k: int | None) -> None:
        """As `Reference.score`. A collective. Raises StopRun, on all ranks, if the server fails one of them."""
        parts = [sequences_of(micro) for micro in micros]
        scores: list[Scores] = []
        problem = None
        try:
            scores = self.server.score_all([ids for sequences, _ in parts for ids in sequences], top_k)
        except ServerError as error:
            problem = f"{KEY}={self.server.url}: {error}"
        problems = [found for found in gather(problem) if found is not None]
        if problems:
            raise StopRun(f"the teacher's log-probabilities are missing: {problems[0]}")
        of_sequences = iter(scores)
        for micro, (sequences, place_R) in zip(micros, parts, strict=True):
            of_micro = [next(of_sequences) for _ in sequences]
            num_rows = len(place_R)
            logp_R = np.empty(num_rows, np.float32)
            ids_RJ = np.empty((num_rows, top_k or 0), np.int64)
            logp_RJ = np.empty(ids_RJ.shape, np.float32)
            for row, (seq, place) in enumerate(zip(micro.seq_R.tolist(), place_R, strict=True)):
                of_target = of_micro[seq]
                logp_R[row] = of_target.logp_T[place - 1]
                ids_RJ[row] = of_target.ids_TJ[place - 1]
                logp_RJ[row] = of_target.logp_TJ[place - 1]
            device = micro.mask_R.device
            micro.ref_logp_R = on_device(logp_R, device)
            if top_k is not None:
                micro.ref_ids_RJ = on_device(ids_RJ, device)
                micro.ref_logp_RJ = on_device(logp_RJ, device)

    def follow(self, model: Decoder, cfg: GRPOConfig, step: int) -> None:
        pass


def sequences_of(micro: MicroBatch) -> tuple[list[list[int]], np.ndarray]:
    """The ids of each sequence of a pack up to its last target, by its number, and [R]: each target's place in them."""
    token_T = micro.token_T.cpu().numpy()
    pos_R = micro.pos_R.cpu().numpy()
    target_R = micro.target_R.cpu().numpy()
    seq_R = micro.seq_R.cpu().numpy()
    place_R = micro.position_T.cpu().numpy()[pos_R] + 1
    bounds = micro.layout.bounds
    sequences = []
    for seq in range(seq_R.max(initial=-1) + 1):
        rows = np.flatnonzero(seq_R == seq)
        if len(rows) == 0:  # a sequence without a target, such as an observation alone
            sequences.append([0])
            continue
        last = rows[place_R[rows].argmax()]
        segment = np.searchsorted(bounds, pos_R[last], side="right") - 1
        ids = token_T[bounds[segment] : pos_R[last] + 1].tolist()
        prefix = micro.layout.prefixes[segment]
        if prefix >= 0:
            ids = token_T[bounds[prefix] : bounds[prefix + 1]].tolist() + ids
        sequences.append([*ids, int(target_R[last])])
    return sequences, place_R
