"""A step for `finetuning.group` in the tests: sharded weights, one of which is not finite in one process only."""

from typing import Any

from finetuning import child, processes


def run(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from finetuning.callbacks import refuse_non_finite_weights

    processes.join(2)
    if job["fails"] == processes.rank():
        raise MemoryError("this process has no memory left")
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    refuse_non_finite_weights(model, 1)
    if processes.rank() == 1:
        model.weight.to_local().data[0, 0] = float("nan")
    refuse_non_finite_weights(model, 2)
    return {}


if __name__ == "__main__":
    child.main(run)
