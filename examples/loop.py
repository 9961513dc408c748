"""A training loop without Lightning: `torchrun --nproc-per-node 2 examples/loop.py`."""

import torch
import torch.distributed as dist

import lightning_zero


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs, with the module on its GPU
    torch.manual_seed(dist.get_rank())
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    config = lightning_zero.ZeroConfig(stage=3)
    engine = lightning_zero.Engine(module, optimizers=[optimizer], config=config)

    for _ in range(50):
        for micro_batch in range(2):
            x = torch.randn(32, 8)
            loss = (module(x) - x.sum(dim=1, keepdim=True)).square().mean() / 2
            if micro_batch == 0:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        engine.step()
        engine.zero_grad()

    with lightning_zero.gathered(module):  # every rank must enter it
        print(f"rank {dist.get_rank()}: loss {loss:.4f}, {module[0].weight.shape}")
    report = engine.memory_report()
    print(f"{report.total_bytes} of {report.data_parallel_bytes} bytes")
    engine.close()  # unshards the module and the optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
