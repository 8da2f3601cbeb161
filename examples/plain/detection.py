"""Train a detector of squares: images have one to three boxes, and the loss is a mean over all boxes of the batch."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIDE, CELL = 24, 4
Sample = tuple[Tensor, Tensor]


class Squares(Dataset[Sample]):
    """Noisy images (1, SIDE, SIDE), each with its boxes (n, 3): row, column and side, in pixels."""

    def __init__(self, count: int) -> None:
        self.boxes = [torch.randint(3, 21, (n, 3)).clamp(max=SIDE) for n in torch.randint(1, 4, (count,)).tolist()]
        self.noise = 0.1 * torch.randn(count, 1, SIDE, SIDE)

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> Sample:
        image = self.noise[index].clone()
        for row, column, side in self.boxes[index].tolist():
            half = side // 6 + 1
            image[0, max(row - half, 0) : row + half, max(column - half, 0) : column + half] += 1
        return image, self.boxes[index].to(image)


def collate(samples: list[Sample]) -> tuple[Tensor, list[Tensor]]:
    """Return the images as one tensor, and the boxes as a list, since their numbers differ."""
    return torch.stack([image for image, _ in samples]), [boxes for _, boxes in samples]


def total_loss(output: Tensor, boxes: list[Tensor]) -> tuple[Tensor, int]:
    """Return the sum of the losses of all cells and boxes, and the number of boxes; `output` is (batch, 4, n, n)."""
    object_logits, box_outputs = output[:, 0], output[:, 1:].movedim(1, -1)
    target, total = torch.zeros_like(object_logits), output.new_zeros(())
    for number, box in enumerate(boxes):
        row, column = (box[:, :2] / CELL).long().unbind(1)
        target[number, row, column] = 1
        total = total + F.smooth_l1_loss(box_outputs[number, row, column], box / SIDE, reduction="sum")
    return total + F.binary_cross_entropy_with_logits(object_logits, target, reduction="sum"), sum(map(len, boxes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    loader = DataLoader(Squares(args.images), batch_size=32, shuffle=True, collate_fn=collate)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 4, 1)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        losses = []
        for x, boxes in loader:
            total, count = total_loss(model(x), boxes)
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append(total.item() / count)
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}")


if __name__ == "__main__":
    main()
