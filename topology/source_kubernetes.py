"""What Kubernetes says: an Indexed Job's or JobSet's variables, as far as a manifest sets them.

The controller itself sets JOB_COMPLETION_INDEX alone. JOBSET_NAME and REPLICATED_JOB_NAME are there
where a manifest maps them from annotations, as xpk's does. Pods of a JobSet are called
<jobset>-<replicated job>-<index of the job: the slice>-<index of the pod: the host>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tpu_dist.topology.claims import Claim, Description
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.source_texts import read_first, read_int


def describe_kubernetes(environ: Mapping[str, str], known: Description) -> Description:
    """Return what Kubernetes says, having looked whether the hosts known are of this JobSet.

    Args:
        environ: the environment.
        known: what the TPU_* variables say.

    Raises:
        TopologyError: the hosts are another JobSet's, or another slice's, or a variable cannot be
            read.
    """
    jobset = environ.get("JOBSET_NAME", "").strip()
    job = environ.get("REPLICATED_JOB_NAME", "").strip()
    coordinator = None
    slice_index = None
    if jobset and known.hostnames is not None:
        slice_index = _slice_of_hosts(jobset, job, known.hostnames)
    if known.num_slices is None:
        slice_index = None  # a JobSet may as well run jobs that have nothing to do with each other
    if jobset and job and known.coordinator is None and known.num_slices is not None:
        address = f"{jobset}-{job}-0-0.{jobset}"
        coordinator = Claim(address, f"JOBSET_NAME={jobset}, REPLICATED_JOB_NAME={job}")
    return Description(
        completion_index=read_first(read_int, environ, "JOB_COMPLETION_INDEX"),
        coordinator=coordinator,
        slice_index=slice_index,
    )


def _slice_of_hosts(jobset: str, job: str, hostnames: Claim[tuple[str, ...]]) -> Claim[int] | None:
    labels = [name.partition(".")[0] for name in hostnames.value]
    if any(re.fullmatch(r"[\d.]+|\[.*\]", name) for name in hostnames.value):
        return None  # addresses tell nothing
    foreign = [label for label in labels if not label.startswith(f"{jobset}-")]
    if foreign:
        raise TopologyError(
            f"the hosts are those of another job: {hostnames.origin} has {foreign[0]!r}, and the "
            f"pods of JOBSET_NAME={jobset} are called {jobset}-... . Unset or correct the list."
        )
    pattern = re.compile(rf"{re.escape(jobset)}-{re.escape(job) if job else '.+'}-(\d+)-\d+")
    matches = [pattern.fullmatch(label) for label in labels]
    slices = {int(match[1]) for match in matches if match}
    if len(slices) > 1:
        raise TopologyError(
            f"{hostnames.origin} has hosts of several slices ({', '.join(map(str, sorted(slices)))}"
            f"), and must have those of one. Correct it."
        )
    return Claim(slices.pop(), hostnames.origin) if slices and job else None
