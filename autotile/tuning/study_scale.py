"""The scale of a session's times where several sessions share a study, each on a GPU of its own.

GPUs of one model differ by some percent, by which a configuration would win or lose for the GPU that it was tried on.
`autotile.tuning.gpu_group` puts the times of one session's GPUs on one scale; this module does so for sessions. The
reference is the default configuration, which every session begins with and only one gets to claim. The others measure
it, too, and multiply their times by the ratio of its stored time to their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from autotile.core.model import Config, Outcome, Trial
from autotile.core.text import time_text
from autotile.tuning.backend import Backend
from autotile.tuning.pipeline import Pipeline
from autotile.tuning.shared_study import SharedStudy
from autotile.tuning.stopping import StoppingRules, TrialLog

_MEASUREMENTS = 3
"""Measurements of the reference, of which the median counts."""
_WAIT_S = 0.1
"""Interval at which a session looks for the reference that another one is trying."""


class StudyScale:
    """Puts the times of a session on the scale of its study.

    Without a reference, because the default configuration does not run or its GPU is not known, times stay as they are:
    finals are held on one GPU in any case.

    Parameters
    ----------
    pipeline
        Pipeline of the session, whose `scale` is set.
    backend
        Device of the session.
    default
        Default configuration.
    log
        Trials of the study, as far as the session knows them.
    shared, rules
        Where configurations are claimed, and the user's interrupt.

    Attributes
    ----------
    notices
        A line for the user if the times are rescaled.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        backend: Backend,
        default: Config,
        *,
        log: TrialLog,
        shared: SharedStudy,
        rules: StoppingRules,
    ) -> None:
        self._pipeline = pipeline
        self._backend = backend
        self._log = log
        self._shared = shared
        self._rules = rules
        self._default = default
        self.notices: tuple[str, ...] = ()

    def align(self) -> None:
        """Measure the reference if another session did, on another GPU; call it while no candidate runs.

        Raises
        ------
        WorkerError
            The GPU workers die repeatedly.
        """
        reference = self._log.find(self._default)
        if reference is None or not self._is_foreign(reference) or reference.time_us is None:
            return
        times_us = self._pipeline.measure_again(reference, _MEASUREMENTS)
        if times_us:
            own_us = float(np.median(times_us))
            self._pipeline.scale = scale = round(reference.time_us / own_us, 6)
            self.notices = (
                f"times are multiplied by {scale:.4f}: the default takes {time_text(own_us)} on {self._backend.uuid}, "
                f"and {time_text(reference.time_us)} on {reference.gpu}, where the study began",
            )

    def claim(self, configs: Sequence[Config], room: int | None) -> Sequence[bool]:
        """Claim configurations as `SharedStudy.claim` does.

        Where another session is trying the default, this one waits for it, and then measures it, too. Nothing else runs
        yet: a search proposes the default first.
        """
        ours = [*self._shared.claim(*configs, room=room)]
        if self._backend.uuid and self._default in configs and not ours[place := configs.index(self._default)]:
            while self._log.find(self._default) is None and not ours[place] and not self._rules.stop.requested:
                time.sleep(_WAIT_S)
                (ours[place],) = self._shared.claim(self._default)  # the other session may have died
            if not self._pipeline.running:
                self.align()
        return ours

    def _is_foreign(self, reference: Trial) -> bool:
        own = self._backend.uuid
        return reference.outcome is Outcome.OK and bool(own and reference.gpu) and reference.gpu != own
