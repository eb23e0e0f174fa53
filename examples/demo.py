"""Copy memory over 1,024 steps: train a small model, merge it, and see that nothing changed.

Each sequence begins with one of eight symbols; blanks follow. The model must name the symbol at the end.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mrconv import MRConv, SequenceClassifier, param_groups, reparameterize

SYMBOLS, LENGTH, BATCH, STEPS = 8, 1024, 16, 100


def batch() -> tuple[Tensor, Tensor]:
    """Return BATCH sequences of tokens and the symbol that each began with."""
    answer = torch.randint(SYMBOLS, (BATCH,))
    tokens = torch.full((BATCH, LENGTH), SYMBOLS)
    tokens[:, 0] = answer
    return tokens, answer


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, answer: Tensor) -> tuple[Tensor, float, float]:
    """Return logits, accuracy and seconds for one pass (the best of five)."""
    seconds = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        logits = model(tokens)
        seconds = min(seconds, time.perf_counter() - start)
    return logits, (logits.argmax(1) == answer).float().mean().item(), seconds


def main() -> None:
    """Train, merge, compare; exit with an error if the merged model differs or has not learned."""
    torch.manual_seed(0)
    model = SequenceClassifier(
        n_classes=SYMBOLS,
        vocab_size=SYMBOLS + 1,
        d_model=32,
        depth=2,
        l_max=LENGTH,
        kernel="fourier",
        kernel_size=4,
        block_norm="layer",
        pool="last",
    )
    layers = [module for module in model.modules() if isinstance(module, MRConv)]
    print(f"recall one of {SYMBOLS} symbols after {LENGTH - 1} blanks")
    print(f"{len(layers)} layers of {layers[0].resolutions} branches each, trained as one convolution\n")

    optimizer = torch.optim.AdamW(param_groups(model, lr=0.01, weight_decay=0.01, kernel_lr=0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    start = time.perf_counter()
    for step in range(1, STEPS + 1):
        tokens, answer = batch()
        loss = F.cross_entropy(model(tokens), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            rate = step * BATCH / (time.perf_counter() - start)
            print(f"step {step:3d}/{STEPS}   loss {loss.item():.3f}   {rate:.0f} sequences/s", flush=True)

    model.eval()
    tokens, answer = batch()
    rows = []
    for name in ("N branches", "merged"):
        if name == "merged":
            reparameterize(model)
        for layer in layers:
            layer.backend = "reference" if name == "N branches" else "auto"
        logits, accuracy, seconds = evaluate(model, tokens, answer)
        rows.append((name, sum(p.numel() for p in model.parameters()), accuracy, seconds, logits))
    print("\n            parameters   accuracy   ms a batch")
    for name, count, accuracy, seconds, _ in rows:
        print(f"{name:10s} {count:11,d} {accuracy:9.1%} {1e3 * seconds:11.1f}")
    difference = (rows[0][4] - rows[1][4]).abs().max() / rows[0][4].abs().max()
    print(f"\nlargest difference of the logits, relative: {difference:.1e}")
    if difference > 1e-4 or rows[1][2] < 0.9:
        raise SystemExit("demo failed: the merged model differs, or the model has not learned to recall")
    print("merged and unmerged agree")


if __name__ == "__main__":
    main()
