"""Comments and docstrings of ejected files in Simplified Chinese."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from .cut import Edit, Text

COMMENTS = {
    # program.py
    "samples in an optimizer step, over all ranks": "一次优化器更新的样本数，所有 rank 合计",
    "samples that a rank evaluates at once": "评估时每个 rank 一次处理的样本数",
    "micro-batches in an optimizer step": "一次优化器更新包含的 micro-batch 数",
    "epochs": "单位：epoch",
    "optimizer steps": "单位：优化器更新次数",
    "the peak": "峰值",
    "of the random numbers that follow from (seed, epoch, sample)": "用于由 (seed, epoch, 样本) 决定的随机数",
    "of each channel, in units of the stored bytes": "各通道的均值，单位为存储的字节值；下一行是标准差",
    "of the image in a frame of black pixels": "图像外加一圈黑色像素",
    "without a square of half the side around a random pixel": "以随机像素为中心，抹去边长一半的方块",
    "Optical Recognition of Handwritten Digits: E. Alpaydin, C. Kaynak, 1998, UCI, CC BY 4.0.": (
        "数据：Optical Recognition of Handwritten Digits，E. Alpaydin, C. Kaynak, 1998, UCI, CC BY 4.0。"
    ),
    "of any dimension": "任意维度",
    "more than half precision": "高于半精度",
    "dropout differs between ranks": "各 rank 的 dropout 不同",
    "downloads, if need be, before the others read": "必要时先下载，其他 rank 再读取",
    "Return the model with BatchNorm layers whose statistics are those of all ranks.": (
        "返回 BatchNorm 统计量取自所有 rank 的模型。"
    ),
    "The sum over all ranks; so is its gradient.": "对所有 rank 求和；梯度同样如此。",
    "a host's ranks are adjacent": "同一台主机的 rank 编号相邻",
    "as RANK of WORLD_SIZE, at MASTER_ADDR:MASTER_PORT": "读取 RANK、WORLD_SIZE、MASTER_ADDR、MASTER_PORT",
    "the same initial weights on every rank": "每个 rank 的初始权重相同",
    "Gradients are exchanged in the backward pass of the last micro-batch.": (
        "只在最后一个 micro-batch 的反向传播中交换梯度。"
    ),
    "DDP divides by the number of ranks": "DDP 会除以 rank 数",
    "FSDP divides by the number of ranks": "FSDP 会除以 rank 数",
    "classes of the modules whose weights are gathered one at a time": "这些类的模块逐个收集权重",
    "each rank calls the model as often, perhaps without a sample": "各 rank 调用模型的次数相同，最后可能没有样本",
    "each rank has a part of the optimizer's state": "每个 rank 只有优化器状态的一部分",
    "all ranks gather the weights": "所有 rank 一起收集权重",
    "Shift int64 to the right, as unsigned integers.": "把 int64 当作无符号整数右移。",
    "Return 64 random bits for each index (n,): a counter, hashed by SplitMix64's finalizer.": (
        "为每个下标 (n,) 返回 64 个随机位：计数器经 SplitMix64 的终结函数散列。"
    ),
    "Return a key of 64 bits for some integers.": "为若干整数返回一个 64 位的键。",
    "Return an epoch's order (samples,): a Feistel network enciphers positions, again if the result is no sample.": (
        "返回一个 epoch 的样本顺序 (samples,)：用 Feistel 网络加密位置，结果越界则再加密一次。"
    ),
    "Return bytes x (n, C, H, W), normalised and varied. Sample `indices` (n,) decide each variation.": (
        "返回归一化并增强后的图像 x (n, C, H, W)。每个样本的增强由其下标 `indices` (n,) 决定。"
    ),
    "Return bytes (n, C, H, W) with mean 0 and variance 1 over the training set.": (
        "返回归一化后的图像 (n, C, H, W)：在训练集上均值为 0，方差为 1。"
    ),
    "Return images (N, C, H, W) uint8 and labels (N,) for training, and the same for testing.": (
        "返回训练集的图像 (N, C, H, W) uint8 和标签 (N,)，以及测试集的图像和标签。"
    ),
    "Images whose augmentation follows from (seed, epoch, sample), in whichever process decodes them.": (
        "图像的增强只由 (seed, epoch, 样本) 决定，与由哪个进程解码无关。"
    ),
    "Return the training and the test set, whose samples are (3, size, size) uint8.": (
        "返回训练集和测试集，样本为 (3, size, size) uint8。"
    ),
    "Yield this process's part of each batch, without padding, and the number of samples in the whole batch.": (
        "依次返回本进程在每个 batch 中的部分（不填充），以及整个 batch 的样本数。"
    ),
    "Return this process's part of a batch's samples (n,). The ranks' parts differ by one sample at most.": (
        "返回本进程在 batch 样本 (n,) 中的部分。各 rank 的样本数最多相差一个。"
    ),
    "BatchNorm over the samples of all ranks, on CPUs. torch.nn.SyncBatchNorm needs GPUs.": (
        "在 CPU 上对所有 rank 的样本做 BatchNorm。torch.nn.SyncBatchNorm 需要 GPU。"
    ),
    "Return the number of samples of the smallest batch.": "返回最小的 batch 的样本数。",
    "Return the rate at an optimizer step.": "返回某一步的学习率。",
    "Return the sum of the losses of images x (n, C, H, W) with labels y (n,).": (
        "返回图像 x (n, C, H, W) 与标签 y (n,) 的损失之和。"
    ),
    "Return (accuracy, mean loss). Each sample counts once: sums are added up over the ranks, and divided once.": (
        "返回（准确率，平均损失）。每个样本只计一次：各 rank 先求和，最后只除一次。"
    ),
    "Load the weights of a run, such as runs/NAME/checkpoints/best/model.safetensors.": (
        "加载一次运行的权重，例如 runs/NAME/checkpoints/best/model.safetensors。"
    ),
    "Train.": "训练。",
    "Run one of this host's ranks.": "运行本机的一个 rank。",
    # plain.py
    "Batches are divided and weighted as by a session; their order differs.": (
        "batch 的划分和加权与 session 相同；顺序不同。"
    ),
    "Not carried over: resuming and checkpoints, records (log, score), proofs, the watchdog.": (
        "未包含：断点续训与检查点、记录（log、score）、证明、看门狗。"
    ),
    "Rank 0 prints.": "只有 rank 0 打印。",
    "torch synchronises statistics on GPUs only": "torch 只能在 GPU 上同步统计量",
    "Join the ranks that torchrun has started; return (rank, world size, device).": (
        "加入 torchrun 启动的进程组，返回 (rank, world size, 设备)。"
    ),
    "Return the model, whose gradients DDP averages over the ranks, and whose BatchNorm layers are synchronised.": (
        "返回模型：DDP 对各 rank 的梯度取平均，BatchNorm 层同步。"
    ),
    "This rank's part of each batch of `size` samples, unpadded: parts differ by one sample at most.": (
        "每个 `size` 个样本的 batch 中属于本 rank 的部分，不填充：各 rank 的样本数最多相差一个。"
    ),
    "The same in ascending order, with batches of about `size` samples.": "同上，但按升序，每个 batch 约 `size` 个样本。",
    "another order in the next pass, alike on all ranks": "下一遍换一个顺序，所有 rank 相同",
    "alike on all ranks: weights, data": "所有 rank 相同：权重、数据",
    "A loader whose batches are divided among the ranks, on the device.": (
        "把每个 batch 分给各 rank 的 DataLoader，数据位于设备上。"
    ),
    "Return a loader of this rank's parts of the loader's batches.": "返回只读取本 rank 部分的 DataLoader。",
    "Yield this rank's parts of the loader's batches: each sample once over all ranks, in ascending order.\n\n"
    "The models are in evaluation mode, and no gradients are computed.": (
        "依次返回本 rank 的部分：所有 rank 合起来每个样本恰好一次，按升序。\n\n模型处于评估模式，不计算梯度。"
    ),
    "Return tensors in lists, tuples and dictionaries on the device.": "把列表、元组和字典中的张量移到设备上。",
    "Add the gradients of the mean over all ranks' samples; `loss` is the mean over this rank's `count` samples.\n\n"
    "DDP divides by the number of ranks, so that a rank's loss is weighted by its share times the ranks.": (
        "累加“所有 rank 样本的平均损失”的梯度；`loss` 是本 rank `count` 个样本的平均损失。\n\n"
        "DDP 会除以 rank 数，所以每个 rank 的损失要乘以它所占的比例再乘以 rank 数。"
    ),
    "Return the sum of a number or tensor over the ranks.": "返回一个数或张量在所有 rank 上的和。",
    "Return the largest of a number or tensor over the ranks.": "返回一个数或张量在所有 rank 上的最大值。",
    "Return the mean over all ranks' samples; `value` is the mean over this rank's `count`.": (
        "返回所有 rank 样本的均值；`value` 是本 rank `count` 个样本的均值。"
    ),
    "Return the ranks' rows, one rank after the other, without gradients.": "按 rank 的次序拼接各 rank 的行，不含梯度。",
    # models
    "In place: the last BatchNorm of the residual does not need its output for the backward pass.": (
        "原地相加：残差分支最后的 BatchNorm 在反向传播中不需要自己的输出。"
    ),
    "the smallest of the paper's CIFAR family: right for 8×8 digits too": "论文中 CIFAR 系列里最小的网络，也适合 8×8 的数字",
    "Two 3×3 convolutions, or a bottleneck of three, and a shortcut.\n\n(N, inputs, H, W) → "
    "(N, width or, of a bottleneck, 4 × width, ⌈H/stride⌉, ⌈W/stride⌉).": (
        "两个 3×3 卷积，或由三个卷积组成的瓶颈，加上 shortcut。\n\n(N, inputs, H, W) → "
        "(N, width，瓶颈为 4 × width, ⌈H/stride⌉, ⌈W/stride⌉)。"
    ),
    "`blocks[i]` blocks of `widths[i]` in stage i; gives logits (N, classes).": (
        "第 i 个阶段有 `blocks[i]` 个宽度为 `widths[i]` 的块；输出 logits (N, classes)。"
    ),
    "Draw the convolutions' weights by He's rule (arXiv 1502.01852).": "按 He 初始化卷积权重（arXiv 1502.01852）。",
    "Exact, so that no width depends on the rounding of floats.": "用精确的分数，使宽度不受浮点舍入影响。",
    "Zeros and an addition in place: 1.2 to 1.5 times as fast as adding into a slice (whole net on a CPU).": (
        "补零后原地相加：比加到切片上快 1.2 到 1.5 倍（CPU 上的整个网络）。"
    ),
    "Return the channels after the stem and after each block.\n\nRounding takes halves to the even number. `reference` "
    "leaves out the last block of each stage, at the same pace.": (
        "返回 stem 之后以及每个块之后的通道数。\n\n舍入时 0.5 取偶数。`reference` 省去每个阶段的最后一个块。"
    ),
    "BN, 3×3 convolution, BN, ReLU, 3×3 convolution, BN; plus the shortcut.\n\n(N, inputs, H, W) → "
    "(N, outputs, ⌈H/stride⌉, ⌈W/stride⌉), outputs ≥ inputs.": (
        "BN、3×3 卷积、BN、ReLU、3×3 卷积、BN，加上 shortcut。\n\n(N, inputs, H, W) → "
        "(N, outputs, ⌈H/stride⌉, ⌈W/stride⌉)，outputs ≥ inputs。"
    ),
    "The net of `depth` and widening α.\n\n(N, in_channels, H, W) → logits (N, classes).\nDepth 110 and α 270 have "
    "28,485,477 parameters for 10 classes. `reference` is a variant that is widely trained\nunder the same name, "
    "without the last block of each stage: 24,253,410.": (
        "深度为 `depth`、加宽为 α 的网络。\n\n(N, in_channels, H, W) → logits (N, classes)。\n深度 110、α 270、10 类时有 "
        "28,485,477 个参数。`reference` 是同名的常见变体，\n省去每个阶段的最后一个块：24,253,410 个参数。"
    ),
    "The first convolution keeps the sides; pooling before BatchNorm leaves it a quarter of the work.": (
        "第一个卷积保持边长；先池化再做 BatchNorm，只需四分之一的计算。"
    ),
    "A narrow VGG: (N, in_channels, H, W) → logits (N, classes).\n\nEach stage (convolution, max-pool, BatchNorm, ReLU) "
    "halves the sides, rounding up: images of any size pass through.": (
        "窄的 VGG：(N, in_channels, H, W) → logits (N, classes)。\n\n每个阶段（卷积、最大池化、BatchNorm、ReLU）把边长减半，"
        "向上取整：任何大小的图像都可以。"
    ),
    "Return a tiny perceptron, with which a step's cost is the loop's.\n\n(N, *shape) → logits (N, classes); the samples "
    "may be of any shape.": (
        "返回一个很小的感知机，一步的开销几乎全在训练循环上。\n\n(N, *shape) → logits (N, classes)；样本可以是任何形状。"
    ),
    # header
    "Not carried over:": "未包含：",
    "- the watchdog, restarts and resuming": "- 看门狗、重启与断点续训",
    "- proofs: digests of replicas, counts of samples": "- 证明：副本摘要、样本计数",
    "- records: steps.jsonl, TensorBoard, checkpoints with the optimizer's state": (
        "- 记录：steps.jsonl、TensorBoard、带优化器状态的检查点"
    ),
    "- draws of dropout: they differ from the run's": "- dropout 的随机数：与原来的运行不同",
    "It reads digits.npz beside it; copy it from the package:": "它读取同一目录下的 digits.npz；请从软件包中复制：",
}
"""{English: Chinese}"""
_PATTERNS = {
    r"^(\S+) on (\S+), in plain PyTorch\.$": r"在 \2 上训练 \1：纯 PyTorch。",
    r"^Written by lockstep (\S+)\. In float64 its losses are the run's\. Config (\w+):$": (
        r"由 lockstep \1 生成，float64 下损失与原来的运行一致。配置 \2："
    ),
}


def translated(text: str) -> str:
    """Return the text with the comments and docstrings of ejected files in Chinese. Others stay."""
    result = text
    for edit in sorted(_edits(Text(text)), reverse=True):
        result = result[: edit.start] + edit.text + result[edit.stop :]
    return result


def _edits(text: Text) -> Iterator[Edit]:
    for token in tokenize.generate_tokens(io.StringIO(text.text).readline):
        if token.type == tokenize.COMMENT and token.string.lstrip("# ") in COMMENTS:
            start = text.line_start(token.start[0]) + token.start[1]
            yield Edit(start, start + len(token.string), f"# {COMMENTS[token.string.lstrip('# ')]}")
    for node in ast.walk(text.tree):
        if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) or not ast.get_docstring(node):
            continue
        value = node.body[0]
        assert isinstance(value, ast.Expr)
        docstring, indent = ast.get_docstring(node) or "", " " * value.col_offset
        if docstring in COMMENTS:
            lines = COMMENTS[docstring].splitlines()
        elif isinstance(node, ast.Module):
            lines = [_translated_line(line) for line in docstring.splitlines()]
        else:
            continue
        translation = "\n".join([*lines, ""]) if len(lines) > 1 else lines[0]
        yield Edit(
            text.start(value),
            text.stop(value),
            f'"""{translation}"""'.replace("\n", f"\n{indent}").replace(f"\n{indent}\n", "\n\n"),
        )


def _translated_line(line: str) -> str:
    for pattern, form in _PATTERNS.items():
        line = re.sub(pattern, form, line)
    return COMMENTS.get(line, line)
