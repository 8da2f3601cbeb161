"""`python -m tests.mutants ["NAME"…]`: break one line of lockstep at a time, and see the suite notice.

Each mutant is a defect that would break a promise, and names the test that has to fail where it is: the fastest one
that does. Without names all are tried. A mutant that lives is a promise without a test. A mutant whose test is skipped
on this machine is not tried.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
LIMIT_S = 240.0
AT_ONCE = min(4, os.cpu_count() or 1)
CAUGHT, LIVES, NOT_TRIED = "caught", "LIVES", "not tried"


class Mutant(NamedTuple):
    """One defect."""

    name: str
    file: str
    """Below src/lockstep."""
    text: str
    """What occurs once in the file."""
    replacement: str
    test: str
    """The test that fails, below tests."""

    def broken(self, source: Path) -> str:
        """Return the file's text with the defect in it."""
        text = (source / "lockstep" / self.file).read_text(encoding="utf-8")
        assert text.count(self.text) == 1, f"{self.name}: {self.text!r} is {text.count(self.text)} times in {self.file}"
        return text.replace(self.text, self.replacement)


def _read(table: str) -> tuple[Mutant, ...]:
    """Return the mutants of a table: after the test (=) the defects that it sees, as name: file, - text, + instead."""
    test = ""
    rows: list[tuple[str, str, list[str], list[str], str]] = []
    for line in table.strip().splitlines():
        mark, text = line[:1], line[2:]
        if mark == "=":
            test = text
        elif mark == "-":
            rows[-1][2].append(text)
        elif mark == "+":
            rows[-1][3].append(text)
        elif mark != "#":
            name, _, file = line.partition(": ")
            rows.append((name, file, [], [], test))
    return tuple(Mutant(name, file, "\n".join(old), "\n".join(new), test) for name, file, old, new, test in rows)


MUTANTS = _read(
    r"""
# laws 1 to 3: one model
= ranks/test_hybrid.py::test_gradients_are_exchanged_once_a_step
a rank keeps its own gradients: exchange/allreduce.py
- self._memory.sum_(flat)
+ self._memory.sum_(flat if not self.world.rank else flat.clone())
gradients are exchanged at every micro-batch: exchange/allreduce.py
- if not backward_pass.is_last:
+ if False:
= ranks/test_laws.py::test_strategy_and_accumulation_are_no_part_of_the_model[ddp-2-1-fake]
gradients are summed and not averaged: sessions/stepper.py
- return handed.samples / share.total, expected
+ return self._prepared.world.size * handed.samples / share.total, expected
each rank clips its own gradient: exchange/allreduce.py
- flags.fill_(1)
+ flags.fill_(0)
+         flat.mul_(min(1.0, 0.05 / float(flat.norm())))
+         flags.fill_(1)
the loss that is told is rank 0's: runs/meter.py
- for column in zip(*by_rank, strict=True)]
+ for column in zip(by_rank[0], strict=True)]
= ranks/test_laws.py::test_strategy_and_accumulation_are_no_part_of_the_model[ddp-3-1-fake]
a share is weighed by its own size: sessions/stepper.py
- return handed.samples / share.total, expected
+ return 1 / self._prepared.world.size, expected
= ranks/test_laws.py::test_several_ranks_equal_one_process[3-values7-options7]
a sample that stands in is trained on: sessions/passes.py
- samples if micro.size else 0, may_drop)
+ max(1, samples or 0), may_drop)
the loss of a sample that stands in is told: exchange/batch.py
- return loss * factor if factor else torch.zeros_like(loss)
+ return loss * factor if factor else loss
= ranks/test_laws.py::test_several_ranks_equal_one_process[3-values6-options6]
batch statistics are those of samples that stand in, too: sessions/passes.py
- stands_in = current is not None and current.share.size == 0 and self._prepared.batchnorm == "sync"
+ stands_in = False
= unit/test_engine.py::test_one_process_trains_as_a_loop_by_hand_does
the last batch of an epoch is weighed as a whole one: batching.py
- stop=begin + share.stop, step=step)
+ stop=begin + share.stop, step=step, total=self.global_size)
the last batch of an epoch is dropped by default: config/schema.py
- drop_last: bool = False
+ drop_last: bool = True
= ranks/test_laws.py::test_strategy_and_accumulation_are_no_part_of_the_model[ddp-2-3-fake]
gradients are exchanged a micro-batch too early: sessions/stepper.py
- last=handed is None or handed.share.last,
+ last=handed is None or handed.share.micro > 0,
= ranks/test_laws.py::test_strategy_and_accumulation_are_no_part_of_the_model[single-1-7-fake]
gradients of a part of a batch are found between its micro-batches: exchange/base.py
- part.gradients = self.hide()
+ part.gradients = [(item, item.grad) for item in self.parameters if item.grad is not None]
the average moves at every micro-batch: trainer.py
- if not session.is_last:
+ for average in session.prepared.averages if not session.is_last else ():
+         average.update(1)
+     if not session.is_last:
= unit/test_precision.py::test_the_norm_is_the_whole_models_unscaled
only the first optimizer's gradients are clipped: training/optim.py
- parameters = [item for optimizer in optimizers for group in optimizer.param_groups for item in group["params"]]
+ parameters = [item for group in [*optimizers][0].param_groups for item in group["params"]]
scaled gradients are clipped: training/precision.py
- self.scaler.unscale_(optimizer)
+ pass
= unit/test_precision.py::test_under_fp16_an_overflow_anywhere_changes_the_scale_alone
a step whose gradients overflow is not taken back: training/precision.py
- return self.scaler.step(optimizer)
+ return step()
= unit/test_optim.py::test_the_average_follows_the_weights_and_keeps_the_models_buffers
the average takes the new weights for the old: training/optim.py
- get_ema_multi_avg_fn(decay)
+ get_ema_multi_avg_fn(1 - decay)
= unit/test_optim.py::test_schedules_by_hand
the learning rate falls a step late: training/optim.py
- sum(step >= mark for mark in marks)
+ sum(step > mark for mark in marks)
= unit/test_optim.py::test_an_optimizer_holds_each_training_parameter_once_and_muon_the_matrices_alone
Muon is given vectors: training/optim.py
- (parameter.ndim == 2 or
+ (parameter.ndim <= 2 or
Muon is given filters of groups: training/optim.py
- and module.groups == 1
+ and module.groups
= unit/test_muon.py::test_a_float32_step_has_the_bits_of_torchs[800-True]
Muon forgets that Nesterov looks ahead: training/muon.py
- if group["nesterov"] else average
+ if not group["nesterov"] else average
= unit/test_muon.py::test_float64_stays_float64_and_filters_are_matrices
Muon rounds float64 to bfloat16: training/muon.py
- torch.float64 if matrices.dtype == torch.float64 else torch.bfloat16
+ torch.bfloat16
= unit/test_muon.py::test_more_matrices_of_a_shape_cost_no_more_operations
Muon steps matrices one by one: training/muon.py
- for start in range(0, len(group), size))
+ for size in (1,) for start in range(0, len(group), size))
= ranks/test_sync_batchnorm.py::test_equals_one_process[2d {}-cpu]
BatchNorm stays local: nn/sync_batchnorm.py
- for norm in plain.values():
+ for norm in ():
the running variance is the biased one: nn/cpu_kernels.py
- moments[1] * (total / (total - 1))
+ moments[1]
BatchNorm's backward pass forgets the other ranks: nn/sync_batchnorm.py
- kernels.summed(_WORLDS[world], *sums) if
+ _WORLDS[world].size * kernels.summed(World.alone(), *sums) if
BatchNorm's mean is one of means: nn/cpu_kernels.py
- pooled = (by_rank * fractions).sum(0)
+ pooled = by_rank.mean(0)
= ranks/test_graphs.py::test_graphs_have_the_bits_of_the_eager_model[1-values0]
accumulated gradients stay in the memory that a graph writes to: exchange/base.py
- if self.overwrites_gradients:
+ if False:
a graph takes the place of a smaller batch: training/graphs.py
- return x.shape, x.stride(), x.dtype
+ return x.dtype, x.dim()
= ranks/test_sync_batchnorm.py::test_equals_one_process[2d {}-gpu]
on a GPU, a first rank without a sample gives NaN: nn/cuda_kernels.py
- NO_SAMPLE = 1e-30
+ NO_SAMPLE = 0.0
= ranks/test_sync_batchnorm.py::test_a_compiled_model_has_one_graph_and_the_losses_of_one_process[gpu-False]
a sample that stands in for an empty share enters the statistics: nn/sync_batchnorm.py
- count = 0 if stands_in else
+ count =
= unit/test_strategies.py::test_the_first_replicas_statistics_are_kept
replicas in threads share running statistics: _torch.py
- None if buffer is None else buffer.clone()
+ buffer
= unit/test_strategies.py::test_autocast_holds_in_every_replica
replicas in threads forget the precision: exchange/replicas.py
- enabled=dtype is not None
+ enabled=False
= unit/test_evaluation.py::test_all_ranks_evaluate_the_model_that_is_saved
each rank evaluates statistics of its own: sessions/passes.py
- self._world.broadcast(list(model.buffers()))
+ pass
= unit/test_optim.py::test_a_loss_of_ones_own_is_called_for_training_and_evaluation
an evaluation smooths its labels: training/losses.py
- return training if ":" in config.loss else nn.functional.cross_entropy
+ return training
# the exchange
= unit/test_exchange.py::test_a_bucket_leaves_with_its_last_gradient_and_while_others_are_computed
a bucket leaves before its last gradient: exchange/allreduce.py
- self._missing[self._queue[0]] == 0:
+ self._missing[self._queue[0]] <= 1:
no bucket leaves before the backward pass is over: exchange/allreduce.py
- if plan is not None and self._overlap:
+ if False:
= unit/test_exchange.py::test_buckets_leave_in_one_order_whichever_is_complete_first
a bucket leaves before one that comes before it: exchange/allreduce.py
-             while self._queue and self._missing[self._queue[0]] == 0:
-                 self._launch(part, self._queue.pop(0))
+             if self._missing[position] == 0:
+                 self._launch(part, position)
= unit/test_exchange.py::test_a_batchs_gradients_are_the_sum_over_its_micro_batches
a micro-batch writes over the one before: exchange/allreduce.py
- view.add_(gradient)
+ view.copy_(gradient)
buckets leave in the first micro-batch: exchange/allreduce.py
- if backward_pass.is_last and self._memory is None:
+ if self._memory is None:
= unit/test_exchange.py::test_a_parameter_has_a_gradient_where_any_rank_has_one
a parameter without a gradient sends that of a step before: exchange/allreduce.py
- bucket.view(flat, number).zero_()
+ pass
a parameter that no rank uses has a gradient of zero: exchange/allreduce.py
- has = (bucket.flags(flat) > 0).tolist()
+ has = [True] * len(bucket.indices)
a gradient that another rank alone has is left out: exchange/allreduce.py
- has = (bucket.flags(flat) > 0).tolist()
+ pass
= unit/test_exchange.py::test_layers_that_had_no_part_wake
layers that were once without a gradient have none ever after: exchange/allreduce.py
- if not is_used]
+ if True]
layers without a gradient are exchanged: exchange/allreduce.py
- if position not in self._works and position not in idle:
+ if position not in self._works:
= unit/test_exchange.py::test_a_gradient_that_a_loop_keeps_is_not_written_over
a gradient that a loop keeps is written over: exchange/buckets.py
- if not _torch.is_viewed(flat):
+ if True:
= unit/test_exchange.py::test_a_backward_pass_of_the_users_own_is_none_of_the_exchanges
a backward pass of the user's own is exchanged: exchange/allreduce.py
-             self._pass = None
+             pass
= unit/test_exchange.py::test_ranks_that_come_to_something_else_are_refused
what ranks come to is not compared: exchange/ranks.py
- check_match([row[:3] for row in read],
+ len(read) or check_match([row[:3] for row in read],
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[skip_apart-rank-2-1]
a micro-batch has no number: sessions/stepper.py
- header = Header(base.pass_kind(handed.epoch, handed.place), handed.index)
+ header = Header(base.pass_kind(handed.epoch, handed.place), 0)
= ranks/test_bring.py::test_calls_that_differ_are_named[frozen]
ranks that train other parameters are not told apart: exchange/ranks.py
- header.part + MOST_PARTS * trained
+ header.part
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[accumulate_by_hand-2-2-1]
gradients of the batch before are lost: exchange/batch.py
- for parameter, hidden in self._hidden:
+ for parameter, hidden in self._hidden[:0]:
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[gan-2-1]
each loss of a batch is taken for its first one: exchange/batch.py
- self._number += 1
+ pass
= unit/test_exchange.py::test_a_weighed_mean_is_over_the_whole_batch
a weight is that of the last micro-batch alone: exchange/batch.py
- part.weight = part.weight + weight
+ part.weight = weight
a weighed loss is told as a sum: exchange/batch.py
- part.loss = total if divisor is None else total / divisor
+ part.loss = total
# shares
= unit/test_exchange.py::test_a_loss_leads_to_the_share_of_its_batch_wherever_the_loop_has_come_to
a loss is of the batch that was read last: sessions/shares.py
- else _marks(loss)
+ else []
a loss is marked by what the loop has come to: sessions/shares.py
- metadata[_MARK] = self.current
+ metadata.setdefault(_MARK, next(iter(self._alive.values())))
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[read_ahead-one-2-1]
a batch that is read ahead takes the place of the one that is trained on: sessions/shares.py
- self.current, self._is_sure, self._rows = handed, True, set()
+ pass
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[unreadable_samples-dropped-2-1]
samples that a collate function drops are weighed: sessions/stepper.py
- return handed.samples / share.total, expected
+ return share.size / share.total, expected
a batch that a collate function makes smaller is divided by its samples of before: exchange/batch.py
- return None if total.is_cpu and total.item() == expected else total / expected
+ return None
= unit/test_share.py::test_a_further_pass_over_an_epoch_has_an_order_and_draws_of_its_own
a further pass has the order of the first: data/share.py
- drawn_as = epoch + (again << 32)
+ drawn_as = epoch
= unit/test_share.py::test_a_resumed_stream_goes_on_from_its_state_or_reads_the_batches_before_again
a state that leaves samples out is trusted: data/feed.py
- if signature(sample) == last and following == expected and len(expected) == count:
+ if len(expected) == count:
a stream with other samples goes on silently: data/feed.py
- is_same = signature(batch[-1]) == self._marks[-1].last
+ is_same = True
= unit/test_session.py::test_gradients_that_wait_for_a_step_at_an_epochs_end_are_continued
gradients that wait for a step are not saved: runs/prepared.py
- if pending:
+ if False:
= unit/test_checkpoint.py::test_tensors_of_every_kind_and_meta_come_back_with_the_same_bits
complex numbers lose their imaginary part: checkpoint/write.py
- torch.view_as_real(tensors[name])
+ torch.view_as_real(tensors[name]) * torch.tensor([1, 0])
= unit/test_draws.py::test_a_share_is_rows_of_the_whole
a draw is the first samples' on each rank: training/layout.py
- first = min(share.start, share.total - 1)
+ first = 0
= ranks/test_samples.py::test_samples_of_a_batch_that_a_loop_leaves_do_not_count[2]
samples of a batch that was left are counted: checks/samples.py
- self._batch.clear()  # of a batch
+ pass  # of a batch
# laws 4 and 5: each sample once, in an order of its own
= unit/test_batching.py::test_each_position_is_computed_exactly_once
an epoch's last sample is never trained on: batching.py
- min(start + self.global_size, samples)
+ min(start + self.global_size, samples - 1)
uneven shares overlap: batching.py
- begin = positions.start + part * base + min(part, extra)
+ begin = positions.start + part * base
= unit/test_order.py::test_each_sample_exactly_once
a sample stands twice in the order: data/order.py
- values[outside] = walked = self._encipher(values[outside])
+ values[outside] = walked = values[outside] % np.uint64(self.samples)
= unit/test_evaluation.py::test_each_sample_counts_once
an evaluation pads its last batch: batching.py
- batch_range = _cut(range(samples), batches, batch)
+ batch_range = _cut(range(batches * -(-samples // batches)), batches, batch)
= ranks/test_samples.py::test_a_clean_run_holds_each_sample_once
the order is another one on each rank: jobs/job.py
- seed=self.config.seed, epoch=epoch)
+ seed=self.config.seed + self.world.rank, epoch=epoch)
a sample of each share is not counted: checks/samples.py
- self._batch.append(indices)
+ self._batch.append(indices[1:])
= unit/test_order.py::test_seed_and_epoch_change_the_order
the order is the same in each epoch: data/order.py
- counter.keys(ROUNDS, seed, epoch, samples)
+ counter.keys(ROUNDS, seed, 0, samples)
= ranks/test_data.py::test_any_number_of_ranks_computes_the_same_samples_once[digits]
images are varied otherwise on each rank: data/images.py
- names, request.seed,
+ names, request.seed + request.world.rank,
= unit/test_resident.py::test_seed_and_epoch_change_the_augmentation
images are varied alike in each epoch: data/images.py
- counter.keys(_DRAWS, self._seed, epoch)
+ counter.keys(_DRAWS, self._seed, 0)
= unit/test_mixing.py::test_any_shares_are_those_of_the_mixed_batch[names2]
a share is mixed within itself: data/mixing.py
- partner = (share.start if share.start > begin else end) - 1
+ partner = share.stop - 1
each rank draws its own mixture: data/mixing.py
- seed(counter.keys(GENERATORS, self._seed, epoch, _PURPOSE), step)
+ pass
= unit/test_sets.py::test_own_random_transforms_do_not_depend_on_batch_or_worker
a transform of one's own goes on from the sample before: data/feed.py
-         _seed(*bits)
+         pass
= ranks/test_data.py::test_a_data_set_that_differs_on_one_rank_is_refused_by_all
ranks train on different data: data/ranks.py
- if mismatch := world.find_mismatch(facts):
+ if (mismatch := world.find_mismatch(facts)) and False:
= ranks/test_samples.py::test_counts_name_what_came_twice_or_never
samples that never came are not reported: checks/samples.py
- if absent.number and due == size:
+ if False:
samples that came twice are not reported: checks/samples.py
- np.flatnonzero(summed > 1)
+ np.flatnonzero(summed > 2)
each rank judges its own counts: checks/samples.py
- summed = world.sum_(times).numpy()
+ summed = times.numpy()
= ranks/test_samples.py::test_a_resumed_epoch_counts_what_came_before_by_its_order
each rank counts all that came before a resume: runs/checks.py
- islice(range(0, count, CHUNK), world.rank, None, world.size)
+ range(0, count, CHUNK)
# law 6: a run that is taken up ends with the same bits
= ranks/test_laws.py::test_a_continued_run_ends_with_the_same_bits[7-1-values0]
a run is taken up a step too far: runs/position.py
- "trained": list(meta["trained"])}
+ "trained": list(meta["trained"]), "step": meta["step"] + 1}
the optimizer's state is lost: runs/prepared.py
- load_optimizer(optimizer, loaded)
+ pass
= ranks/test_laws.py::test_a_continued_run_ends_with_the_same_bits[7-2-values1]
the model's randomness begins anew: runs/loop.py
- load_generators(self._world, state.meta["generators"],
+ load_generators(self._world, [],
= ranks/test_laws.py::test_a_continued_run_ends_with_the_same_bits[7-3-values3]
the averaged weights begin anew: runs/prepared.py
- load_model(model, state.part(name), extra.get(name))
+ name == "ema" or load_model(model, state.part(name), extra.get(name))
= unit/test_checkpoint.py::test_a_kill_between_any_two_changes_of_the_disk_leaves_a_whole_checkpoint
a checkpoint is written in its place: checkpoint/write.py
- part = folder / f".saving-{step:08d}-{os.getpid()}"
+ part = free_name(folder, step)
the last checkpoint is deleted before there is another: checkpoint/write.py
- part.replace(link)
+ link.unlink(missing_ok=True)
+     part.replace(link)
the last checkpoint is pointed to before the best: checkpoint/write.py
-         if best:  # first:
+         point(folder / "last", final)
+         if best:  #
an old checkpoint is deleted under its own name: checkpoint/write.py
- folder.rename(hidden)
-     shutil.rmtree(hidden)
+ shutil.rmtree(folder)
= unit/test_checkpoint.py::test_what_is_saved_is_the_state_at_the_call_and_written_beside_the_training
a checkpoint holds the weights of a later step: checkpoint/write.py
- groups.setdefault(group, {})[key] = torch.empty_like(tensor.detach(), device="cpu")
+ groups.setdefault(group, {})[key] = tensor.detach()
= unit/test_record.py::test_a_failed_write_leaves_the_old_file
a file is written in its place: files.py
- part = path.with_name(f".{path.name}.{os.getpid()}.part")
+ part = path
= unit/test_record.py::test_a_full_disk_is_told_once_stops_nobody_and_loses_no_line_once_there_is_room
a full disk leaves half a line: files.py
- self._file.truncate(size)
+ pass
= unit/test_trackers.py::test_a_slow_tracker_fills_its_queue_and_the_run_does_not_wait[Hanging]
a slow tracker gets a queue without end: record/tracking.py
- if self._queue.qsize() < _MOST:
+ if True:
a run waits for its tracker without end: record/tracking.py
- self._thread.join(max(0.0, deadline_s - time.monotonic()))
+ self._thread.join(10.0)
= unit/test_trackers.py::test_a_tracker_gets_config_numbers_and_end_and_a_later_start_goes_on_in_its_record
a resumed run begins another record in its tracker: record/tracking.py
- run_id = str(parse_json(read(self._note))["id"])
+ run_id = ""
= unit/test_trackers.py::test_a_tracker_that_is_down_is_told_once_and_its_losses_at_the_end
points that a tracker has lost are not told of: record/tracking.py
- if not self._has_ended or self._received < self._sent:
+ if not self._has_ended:
= unit/test_trust.py::test_a_tracker_that_a_file_names_is_not_imported
a file names a tracker whose code is imported: cli/flags.py
- untrusted = {key: words for key, words in lists.items() if any(":" in word for word in words)}
+ untrusted = {key: words for key, words in lists.items() if ":" in words[0] and len(words) == 1}
= unit/test_record.py::test_rewind_keeps_what_had_happened_by_the_step
a resumed run keeps the lines of later steps: record/jsonl.py
- if not later:
+ if True:
= unit/test_checkpoint.py::test_no_flipped_bit_passes[model.safetensors]
checksums are not looked at: checkpoint/read.py
- if digest(folder / name) != sums[name]:
+ if False:
= ranks/test_runs.py::test_every_option_either_makes_the_run_or_may_change
a run may go on with another seed: config/options.py
- *("batch", "drop-last", "draws", "seed"),
+ *("batch", "drop-last", "draws"),
= unit/test_folders.py::test_a_folder_is_one_runs_until_its_process_ends_however_that_is
two runs have one folder: runs/folders.py
- lock.acquire()
+ pass
= unit/test_engine.py::test_a_run_that_is_stopped_saves_the_step_it_has_come_to
a run that is stopped does not save: runs/loop.py
- if self._saved_at != step:
-             self.save()
+ pass
= unit/test_checkpoint.py::test_the_last_ones_are_kept_that_the_run_goes_on_from[2-begun1-resumed1]
checkpoints of a branch that the run has left are kept: checkpoint/write.py
- self._own = checkpoints[: checkpoints.index(newest) + 1] if newest in checkpoints else []
+ self._own = checkpoints
= unit/test_remote.py::test_an_upload_that_breaks_off_anywhere_leaves_complete_checkpoints
a store has a checkpoint's checksums before its tensors: runs/remote.py
- key=lambda path: path.name == SUMS
+ key=lambda path: path.name != SUMS
a checkpoint in a store is replaced while it is the last: runs/remote.py
- links = [link for link in LINKS if self._store.target(link) == name]
+ links = list[str]()
a store keeps the checkpoints of a branch that the run has left: runs/remote.py
- if _number(name) <= _number(targets[-1])
+ if True
= unit/test_remote.py::test_a_checkpoint_that_the_run_deletes_meanwhile_is_uploaded
what the run deletes is lost to the upload: runs/remote.py
- (part / path.name).hardlink_to(path)
+ (part / path.name).symlink_to(path)
= ranks/test_runs.py::test_hosts_without_a_common_disk_go_on_from_a_store
rank 0 goes on from what no other host has: runs/remote.py
- name = newest if all(world.gather(has_newest)) else stored
+ name = newest if world.gather(has_newest) else stored
the best checkpoint stays in the store: runs/remote.py
- self.target("best") if is_whole else ""
+ ""
# law 7: replicas are the same bits, and proofs see what is not
= unit/test_digest.py::test_one_bit_is_seen_and_its_tensor_named
a digest is blind to the lowest bit: checks/digest.py
- return flat.view(INTEGERS[flat.element_size()])
+ return flat.view(INTEGERS[flat.element_size()]) & -2
= unit/test_digest.py::test_what_changes_is_seen
a digest does not see two bits that flip: checks/digest.py
- halves[:, 0] ^= halves[:, 1]
+ pass
= ranks/test_replicas.py::test_one_bit_that_flips_while_training_is_found
each rank is compared with itself: checks/replicas.py
- any(row[:-3] != by_rank[0][:-3] for row in by_rank)
+ any(row[:-3] != row[:-3] for row in by_rank)
the optimizer's state is not compared: runs/prepared.py
- if not self.exchange.divides_state:
+ if not self.models:
averaged weights are not compared: runs/prepared.py
- for number, module in modules}
+ for number, module in modules if number < 0}
= unit/test_digest.py::test_statistics_that_are_not_finite_are_not_saved
weights that are no numbers are saved: runs/prepared.py
- if non_finite := finite.find_non_finite(self.world, tensors):
+ if False:
= faults/test_command_failures.py::test_what_goes_wrong_in_the_users_model_is_one_sentence[Exploding]
a loss that is no number stops nothing: runs/meter.py
- if not math.isfinite(parts[number])]
+ if False]
= unit/test_curve.py::test_where_two_curves_part_is_told
curves of which one has no number hold: verify/curve.py
- if first is None or second is None or not (math.isfinite(first) and math.isfinite(second)):
+ if first is None or second is None:
= unit/test_curve.py::test_the_tolerance_is_that_of_the_arithmetic
curves in float64 hold within a thousandth: verify/curve.py
- return 1e-9
+ return 1e-3
= ranks/test_gradients.py::test_a_gap_is_measured_against_the_tensor_and_never_lost
gradients of which one has no number agree: checks/difference.py
- nan_to_num_(nan=math.inf, posinf=math.inf)
+ nan_to_num_(nan=0.0, posinf=math.inf)
= ranks/test_gradients.py::test_each_cause_is_found_and_no_other
a mean of means is by design: verify/gradients.py
- return not self.agrees and not self.by_design
+ return False
= ranks/test_doctor.py::test_a_rank_at_fault_is_named_in_bounded_time
the doctor looks at no byte: doctor/together.py
- if not torch.equal(chunk, sent_by(rank))]
+ if False]
= ranks/test_replicas.py::test_a_copy_on_another_device_is_compared_too
copies on other devices are not compared: checks/replicas.py
- differ = any(find_differing(tensors, copy) for copy in copies)
+ differ = False
= unit/test_diff.py::test_bits_that_are_no_other_value_are_seen
zeros of other signs are the same bits: checks/difference.py
- torch.equal(_bits(a), _bits(b))
+ torch.equal(a, b)
# law 9: a failure is told in bounded time, and leaves nobody
= unit/test_watch.py::test_ranks_that_move_are_left_alone_and_one_that_stops_is_told_by_all
a rank that stands still is never found: monitor/watchdog.py
- elif self._stalled_s > self._stall_s:
+ elif self._stalled_s > 100 * self._stall_s:
= unit/test_watch.py::test_a_rank_whose_device_waits_for_another_one_is_judged
a host that waits for its device is never judged: monitor/watchdog.py
- and progress.device_waits():
+ and False:
= unit/test_watch.py::test_code_of_its_own_beside_a_dead_rank_is_judged
the user's code beside a dead rank is never judged: monitor/watchdog.py
- return all_live and (not phase or
+ return not phase or (all_live and
= unit/test_watch.py::test_the_last_event_follows_each_exchange
no event follows an exchange: monitor/progress.py
- self.event.record()
+ pass
= unit/test_launchers.py::test_a_kernel_that_has_failed_is_a_cause_and_a_rank_left_alone_an_echo
a kernel's assertion is an echo: launchers/supervisor.py
- if errors:
+ if False:
= unit/test_launchers.py::test_a_lost_rank_is_told_in_plain_words_and_no_other_failure_is
NCCL's plain errors are causes: monitor/failures.py
- |NCCL")
+ ")
= unit/test_launchers.py::test_an_operation_without_a_deterministic_kind_is_refused_by_its_name
an operation without a deterministic kind is a failure like any: monitor/failures.py
- if operation := _NO_DETERMINISM.search(text := _words(error)):
+ if operation := _NO_DETERMINISM.fullmatch(text := _words(error)):
= unit/test_launchers.py::test_gpus_are_those_that_answer_and_that_cudas_variable_names
all of a divided GPU and its neighbours are counted: hardware.py
- return tuple(visible_parts[:1] or chosen)
+ return tuple(chosen)
= unit/test_script.py::test_determinism_that_a_group_was_not_formed_for_is_refused
a group that is not deterministic is taken: sessions/opening.py
- if deterministic and not started.config.precision.deterministic and
+ if False and
= unit/test_checkpoint.py::test_a_devices_tensors_come_through_one_small_buffer
a part of the buffer is written over before it is read: checkpoint/write.py
- if used + part.nbytes > len(buffer):
+ if False:
= unit/test_record.py::test_an_interval_ends_with_two_waits_for_the_device
the host waits for each number of an interval: runs/meter.py
- counts[0] = (last[0].argmax(dim=1) == last[1]).sum()
+ counts[0] = float((last[0].argmax(dim=1) == last[1]).sum())
= unit/test_exchange.py::test_a_weight_on_the_device_costs_operations_by_buckets_and_not_by_parameters
each gradient is cleared by itself: exchange/allreduce.py
- if self._clear is None or index in self._sparse:
+ if True:
= ranks/test_world.py::test_a_group_under_detailed_debugging_waits_as_long_as_any
a group under DETAIL keeps the limit of its forming: world/world.py
- if _torch.get_debug_level() == _torch.DebugLevel.DETAIL:
+ if False:
= ranks/test_world.py::test_every_rank_hears_the_same
what is transposed is broadcast to nobody: world/world.py
- if sent is not memory:
+ if False:
= unit/test_accelerators.py::test_the_accelerator_is_torchs_and_one_that_is_not_there_is_refused
an accelerator that torch lacks is another one: launchers/devices.py
- if name not in ("auto", "cuda") and (built is None or built.type != name):
+ if False:
= unit/test_accelerators.py::test_each_devices_generator_is_seeded_saved_and_restored
an accelerator's generator is not restored: world/random_state.py
- torch.get_device_module(gpu).set_rng_state(state, gpu)
+ pass
= unit/test_watch.py::test_a_rank_whose_beats_no_longer_rise_is_silent
a rank whose beats stay the same is taken to live: monitor/heartbeat.py
- if beat.number != last.number:
+ if True:
= unit/test_curve.py::test_the_others_end_with_the_first_that_fails_and_so_does_all_they_started
what a variant's command has started outlives it: verify/commands.py
- (process, *process.children(recursive=True))
+ (process,)
= faults/test_restarts.py::test_what_comes_back_is_told_and_what_is_refused_not_tried_again[beyond_the_classes]
what is refused is started again: launchers/supervisor.py
- FINAL = {RequestError.__name__, ProofError.__name__}
+ FINAL = {ProofError.__name__}
= faults/test_restarts.py::test_ranks_that_are_lost_come_back_to_the_very_same_bits
ranks that start again take up the run that was left: runs/opened.py
- world.notes.write(_FIRST_CHECKPOINT, _last_checkpoint(path))
+ world.notes.write(_FIRST_CHECKPOINT, "")
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[dropout_of_other_batches-kept-2-1]
batches that the loop keeps have the draws of none: sessions/randomness.py
- if self._global is None or handed is None or (handed is self._share and self._global.is_active):
+ if True:
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[dropout_of_other_batches-ahead-noise-2-1]
noise for one of two batches is that of the last one read: training/draws.py
- if not self._is_alone and not self._is_certain():
+ if False:
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[read_ahead_under_batchnorm-doubled-2-1]
a stand-in sample counts in the statistics of a batch read before: sessions/passes.py
- if assumed is None or assumed[0] is handed:
+ if True:
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[mixed_samples-rolled-2-1]
a collate function that mixes samples is not told: data/feed.py
- return MIXES
+ return ""
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[packed_tokens-unweighted-2-1]
a batch of packed tokens is not told: data/feed.py
- doubt = PACKS if len(tensor) > size else doubt
+ pass
= ranks/test_bring.py::test_a_loop_that_is_killed_resumes_to_the_same_bits[code_after_an_evaluation-schedule-3]
an evaluation saves half a step: sessions/passes.py
- self._stepper.settle(saves=False)  # code of this step may follow, such as a schedule's
+ self._stepper.settle()
= ranks/test_bring.py::test_a_loop_that_is_killed_resumes_to_the_same_bits[same_batch_again-twice-3]
the first of two steps on a batch is saved: sessions/stepper.py
- self._end(self.share, parts=self._parts_at_step, saves=False)
+ self._end(self.share, parts=self._parts_at_step)
= ranks/test_bring.py::test_a_loop_that_is_killed_resumes_to_the_same_bits[second_loader-outliving-2]
a resumed run begins its second loader anew: sessions/passes.py
- self._resumed[id(loader)] = here
+ pass
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[unprepared_part-model-2-1]
each rank trains a criterion of its own: sessions/first_step.py
- if self._foreign and self._is_shared:
+ if False:
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[loader_that_acts-mined-2-1]
ranks draw samples in different orders: sessions/passes.py
- if is_first_batch and counts and loop.is_running and (order := getattr(source, "order_digest", "")):
+ if False:
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[ignored_labels-unweighted-2-1]
labels that are left out are not told: sessions/first_step.py
- if self._is_shared and any(world.gather(is_other)):
+ if False:
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[state_by_rank-2-1]
state that differs between ranks is not told: runs/prepared.py
- if digest_here != digest_there:
+ if False:
= ranks/test_bring.py::test_a_loop_comes_to_the_plain_numbers_or_is_refused[squeezed_samples-2-1]
a squeezed batch ends the run: data/feed.py
- any(not half.dim() or half.shape[1:]
+ any(half.shape[1:]
= unit/test_session.py::test_evaluations_that_are_under_way_together_end_in_any_order
of two evaluations the last one to end seems to go on: sessions/passes.py
- outer_share if self._open_evaluations > 1 else None
+ outer_share
= unit/test_session.py::test_what_no_resume_would_restore_is_told_at_the_first_save
a restored copy is not compared: runs/loop.py
- for sentence in self.prepared.compare_restored(state):
+ for sentence in ():
a restored copy has the live weights already: runs/restored.py
- tensor.zero_()
+ pass
a GradScaler that no checkpoint holds is not told: sessions/first_step.py
- if saves and scaler is not None and
+ if False and scaler is not None and
= faults/test_signals.py::test_a_stop_comes_with_the_next_step_also_where_steps_have_become_slow
a stop waits for the interval's end: runs/loop.py
-  or self.prepared.exchange.is_asked:
+ :
= faults/test_signals.py::test_what_a_script_has_started_ends_with_a_command_that_is_killed
what a rank has started outlives the command: launchers/supervisor.py
- add(worker)
+ pass
= unit/test_cli.py::test_what_a_command_raises_is_one_sentence_letter_by_letter
a run that has failed exits with 0: cli/main.py
-     return error.exit_code
-
+     return 0
+
= unit/test_interrupts.py::test_the_second_signal_ends_the_process_at_once
a second signal is one more first one: monitor/signals.py
- self.insisted = True
+ pass
= unit/test_launchers.py::test_each_rank_takes_gpus_of_its_own
two ranks share a GPU: launchers/rollcall.py
- if other is not member:
+ if False:
= ranks/test_rendezvous.py::test_members_of_an_earlier_start_are_not_taken_for_present_ones
ranks that have ended are taken for present ones: launchers/rollcall.py
- if not rendezvous.outlives:
+ if True:
= unit/test_watch.py::test_a_store_that_answers_while_the_process_ends_does_not_change_the_exit_code
a store that answers late changes the exit code: __main__.py
- if bounded.any_left() or code
+ if code
= unit/test_submit.py::test_a_job_requeues_itself_unless_it_is_done_cancelled_or_never_reaches_a_checkpoint
a job that never reaches a checkpoint requeues itself for ever: launchers/submit.py
- _IDLE_STARTS = 3
+ _IDLE_STARTS = 10**6
a job that was cancelled requeues itself: launchers/submit.py
- if [ "$state" != RUNNING ]; then
+ if false; then
= unit/test_launchers.py::test_the_first_cause_is_not_the_loudest
the loudest failure is the cause: monitor/failures.py
- (failure.is_echo, failure.time)
+ failure.time
# shared memory
= ranks/test_shared_memory.py::test_sums_are_taken_in_the_order_of_the_ranks[3]
sums are taken from the last rank to the first: world/shared_memory.py
- for part, (first, second, *further_slots) in self._exchange("sum", tensor):
+ for part, slots in self._exchange("sum", tensor):
+             first, second, *further_slots = slots[::-1]
= ranks/test_shared_memory.py::test_a_rank_that_reads_slowly_reads_what_was_written
a slot is written while others read it: world/shared_memory.py
- _TURNS = 2
+ _TURNS = 1
= ranks/test_shared_memory.py::test_nobody_waits_for_a_rank_that_does_not_come
a rank that is killed is waited for: world/shared_memory.py
- is_gone = ended.poll(0) or
+ is_gone =
a rank that leaves is waited for: world/shared_memory.py
- or words[peer, _HAS_LEFT]
= ranks/test_shared_memory.py::test_what_does_not_match_is_not_taken_for_what_is_asked
ranks add up what does not match: world/shared_memory.py
- if words[peer, _KIND + turn] != kind:
+ if False:
# laws 10 and 12
= unit/test_accelerators.py::test_a_devices_batches_are_a_cpus_and_copied_once_an_epoch_or_before_they_are_needed
a batch is used before it is copied: data/transfer.py
- torch.accelerator.current_stream(device).wait_event(events.popleft())
+ pass
a batch's memory is used again while the device computes: data/transfer.py
- stream.wait_stream(torch.accelerator.current_stream(device))
+ pass
a batch waits for the next one's copy: data/transfer.py
- torch.accelerator.current_stream(device).wait_event(events.popleft())
+ torch.accelerator.current_stream(device).wait_event(events.pop())
places and draws are copied for each batch: data/resident.py
- if samples >= order.CHUNK or len(chunk) == _SHARES:
+ if True:
a batch is copied when it is needed: data/users.py
- map_ahead(fetch, answers, self._device) if self._has_workers else map(fetch, answers)
+ map(fetch, answers)
a loader's batch is copied when it is needed: data/share.py
- map_ahead(move, micros, device) if self.workers else map(move, micros)
+ map(move, micros)
a data set that may change is read ahead: data/share.py
- map_ahead(move, micros, device) if self.workers else map(move, micros)
+ map_ahead(move, micros, device)
= unit/test_accelerators.py::test_reading_ahead_keeps_the_order_the_errors_and_no_batch
an error of the next batch drops one: data/transfer.py
- while len(copies) > (not is_over):
+ while len(copies) > 1:
= unit/test_trust.py::test_code_that_a_file_names_is_not_imported[eval run]
code is imported where a run names it: cli/flags.py
- flatten(base, imports)
+ flatten(base, ())
= real/test_current_folder.py::test_no_module_of_the_current_folder_is_taken_for_one_of_ours[spawn]
a rank takes modules of the current folder for its own: launchers/process.py
- safe_path = os.environ.setdefault(_SAFE_PATH, _MARK)
+ safe_path = ""
= unit/test_trust.py::test_a_name_on_a_screen_neither_acts_nor_begins_a_line
a name is markup: screen.py
- markup=False
+ markup=True
a name has lines of its own: screen.py
- visible(text).replace("\n", " ")
+ visible(text)
= unit/test_folder.py::test_a_small_file_costs_little_whatever_it_is
an image of any number of pixels is decoded: data/folder.py
- > _MOST_PIXELS:
+ < 0:
= unit/test_shards.py::test_a_shard_that_is_cut_anywhere_is_refused
a shard that ends at a member is taken for whole: data/shards.py
- if os.pread(file.fileno(), len(_END), archive.offset) != _END:
+ if False:
= unit/test_shards.py::test_links_and_special_files_in_a_shard_are_refused
a link in a shard is left out silently: data/shards.py
- raise ValueError(f"{member.name} is a link or special file")
+ continue
= unit/test_folder.py::test_large_jpegs_are_decoded_smaller_and_nearly_the_same
a JPEG is decoded too small for its smallest crop: data/folder.py
- size / _LEAST_CROP if crop
+ size if crop
= unit/test_environments.py::test_no_environment_does_more_than_be_refused
a number of any length is read: launchers/environments.py
-  and len(text) <= _MOST_DIGITS
= unit/test_links.py::test_what_is_opened_late_or_elsewhere_is_no_link_either[a log]
a link is written through: files.py
- return open_regular(path, flags | os.O_NOFOLLOW)
+ return open_regular(path, flags)
= unit/test_links.py::test_what_is_opened_late_or_elsewhere_is_no_link_either[a failure]
a folder that is a link is written to: files.py
-     check_own(path)
-     path.mkdir(parents=True, exist_ok=True)
+     path.mkdir(parents=True, exist_ok=True)
= unit/test_links.py::test_a_run_changes_nothing_outside_its_folder[link]
a link in a run's folder is not refused: runs/folders.py
-             check_own(file)
+             pass
= unit/test_links.py::test_compiled_code_is_kept_where_nobody_else_can_write
compiled code is kept where others can write: files.py
- or status.st_mode & 0o077:
+ :
= faults/test_neighbours.py::test_a_stranger_who_writes_every_key_of_the_store_ends_the_job_and_does_no_more
what is read from the agents' store may name code: _torch.py
- return _Plain(io.BytesIO(state)).load()
+ return pickle.loads(state)
= ranks/test_zero.py::test_a_rank_has_the_state_of_its_own_parameters_and_all_have_the_bits_of_ddp[AdamW]
ranks step their own parameters, and receive no others: exchange/zero.py
- self._unpack(bucket, flat)
+ bucket.release(flat)
= ranks/test_zero.py::test_a_rank_with_another_setting_or_gradient_is_found[setting]
a rank's own learning rate is not compared: runs/prepared.py
- for group in settings for _, value in sorted(group.items())]
+ for group in settings[:0] for _, value in sorted(group.items())]
= ranks/test_zero.py::test_a_rank_with_another_setting_or_gradient_is_found[gradient]
a rank's own gradient is not compared: exchange/zero.py
- self._gradient_sum += gradient.detach().sum().abs().nan_to_num(nan=1.0, posinf=2.0)
+ pass
= ranks/test_zero.py::test_a_rank_has_the_state_of_its_own_parameters_and_all_have_the_bits_of_ddp[SGD]
each rank steps all parameters: exchange/zero.py
- self._hidden.append((parameter, gradient))
-                 parameter.grad = None
+ pass
= ranks/test_zero.py::test_checkpoints_are_those_of_ddp_and_continue_under_every_strategy[gloo]
a checkpoint has rank 0's state alone: exchange/zero.py
- if self.world.is_main and not self.owns(parameter):
+ if not entries:
= ranks/test_sharded.py::test_checkpoints_continue_under_every_strategy
a checkpoint has rank 0's shard alone: runs/prepared.py
- gathered = full_tensor(tensors.pop(name))
+ gathered = local(tensors.pop(name))
= ranks/test_sharded.py::test_a_loop_has_the_weights_of_one_process[1]
torch divides the sums of shards: exchange/sharded.py
- module.set_gradient_divide_factor(1.0)
+ pass
= ranks/test_sharded.py::test_a_loop_has_the_weights_of_one_process[1]
ranks with an unused layer leave it out of the sum: exchange/sharded.py
- module.set_reduce_scatter_unused_params(True, recurse=False)
+ pass
= ranks/test_sharded.py::test_a_loop_has_the_weights_of_one_process[1]
a number's gradient is each rank's own: exchange/sharded.py
- self.world.stack(flat).sum(0)
+ self.world.stack(flat)[self.world.rank]
= ranks/test_sharded.py::test_a_loop_has_the_weights_of_one_process[1]
a rank without labels leaves its samples out of the gradient of others' losses: sessions/stepper.py
- if couples and (handed is None or handed.share.size > 0):
+ if False:
a rank without labels has NaNs in all ranks' statistics: nn/sync_batchnorm.py
- dy = dy.masked_fill(~dy.isfinite() & SyncBatchNorm.weightless, 0)
+ pass
= ranks/test_zero.py::test_a_frozen_layer_with_a_gradient_is_stepped_on_all_ranks
a frozen layer's owner keeps its weights for itself: exchange/zero.py
- parameter.requires_grad or parameter.grad is not None
+ parameter.requires_grad
= ranks/test_sharded.py::test_a_loop_that_would_lose_something_is_refused[outside]
a weight that is used outside of forward is trained by each rank: exchange/sharded.py
- partial(_refuse, parameter) if is_shard(parameter) else partial(self._note, index)
+ partial(self._note, index)
= ranks/test_sharded.py::test_weights_that_stay_gathered_are_never_stale
weights that no backward pass frees are stale after a step: exchange/sharded.py
- self._reshard()
-         if not isinstance(optimizer, Adam):
+ if not isinstance(optimizer, Adam):
an evaluation keeps its weights for the forward pass after it: exchange/sharded.py
- module.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
+ module.set_reshard_after_forward(False, recurse=False)
= ranks/test_exchange.py::test_the_sum_of_a_shard_is_rounded_once[dtype0]
gradients of shards are sent at full width: exchange/compress.py
- received = torch.empty_like(sent)
-     dist.all_to_all_single(_bytes(received), _bytes(sent), group=group)
-     output.copy_(_add(_unpack(received, _sum_type(parts))))
+ dist.reduce_scatter_tensor(output, parts, group=group)
= ranks/test_sharded.py::test_ranks_that_run_different_blocks_are_told
ranks get the weights of each other's blocks: exchange/sharded.py
- if len(set(rows[:, -1].tolist())) > 1:
+ if False:
= ranks/test_sharded.py::test_a_loop_has_the_weights_of_one_process[2]
gradients of earlier micro-batches are lost: exchange/base.py
- for parameter, gradient in part.gradients if adds_in_place else ():
+ for parameter, gradient in []:
= unit/test_layerwise.py::test_each_follows_its_formula[matrix-lars]
LARS takes the rate out of the velocity: training/layerwise.py
- weight -= state["momentum_buffer"].mul_(group["momentum"]).add_(step, alpha=group["lr"])
+ weight -= group["lr"] * state["momentum_buffer"].mul_(group["momentum"]).add_(step)
= unit/test_layerwise.py::test_each_follows_its_formula[matrix-lamb]
LAMB measures its step without the weight decay: training/layerwise.py
- step.add_(weight, alpha=decay)
-         if adapts:
-             step *= _ratio(weight.norm(), step.norm())
+ norm = step.norm()
+         step.add_(weight, alpha=decay)
+         if adapts:
+             step *= _ratio(weight.norm(), norm)
= unit/test_layerwise.py::test_each_follows_its_formula[vector-lars]
weight decay acts on biases too: training/layerwise.py
- decay = group["weight_decay"] if parameter.dim() > 1 else 0.0
+ decay = group["weight_decay"]
= ranks/test_average.py::test_an_average_has_the_weights_of_its_steps[1]
an average counts its points from the first step: training/optim.py
- divmod(step - self._start, self._every)
+ divmod(step, self._every)
an average begins at the initial weights, whatever its start: training/optim.py
- if step <= self._start:
+ if step < self._start:
= ranks/test_recompute.py::test_recomputed_activations_have_the_bits_of_kept_ones[1-options0-1-Net]
activations are kept: nn/recompute.py
- if not torch.is_grad_enabled() or module is None:
+ if True:
recomputed activations draw other numbers: nn/recompute.py
-     generators.put_back(devices)
+     pass
recomputing draws from the generators: nn/recompute.py
- generators_now.put_back(devices)
+ pass
recomputing moves the running statistics: nn/recompute.py
- setattr(norm, name, buffer.clone())
+ pass
= ranks/test_recompute.py::test_recomputed_activations_have_the_bits_of_kept_ones[2-options6-2-Net]
recomputing takes the share that was read last: nn/recompute.py
- SyncBatchNorm.stand_in = stands_in
-     for
+ for
= ranks/test_recompute.py::test_recomputed_activations_have_the_bits_of_kept_ones[2-options9-2-Joined]
a loop that reads ahead forgets which views a recomputed block has joined: training/draws.py
- self._joined.get(number, set()) if visit else set()
+ set()
= ranks/test_contrastive.py::test_gathered_rows_have_the_gradients_of_one_process[symmetric-1]
a gathered row has the gradient of its own rank's loss alone: sessions/collectives.py
- return ctx.world.sum(gradient)[
+ return gradient[
= ranks/test_contrastive.py::test_the_same_sum_of_every_rank_is_told[all-2-True]
a sum over gathered rows that ranks add up is not told: sessions/first_step.py
- if is_sum and node.name() == GATHER:
+ if False:
= ranks/test_contrastive.py::test_gathered_rows_have_the_gradients_of_one_process[own rows-1]
an empty share's sample is gathered: sessions/collectives.py
- local_rows = value if counts else value[:0]
+ local_rows = value
= ranks/test_exchange.py::test_a_sum_in_bfloat16_is_added_at_full_width_and_rounded_twice[dtype0-1000]
gradients in 16 bits are added in 16 bits: exchange/compress.py
- total += row
+ total.copy_((total.bfloat16() + row.bfloat16()))
= ranks/test_powersgd.py::test_what_is_not_sent_is_owed
a matrix's rest is forgotten: exchange/powersgd.py
- matrix += codec.errors[key]
+ pass
a layer that no rank uses pays what it owes: exchange/powersgd.py
- is_sent = (item.flag > 0) & factor.isfinite().all()
+ is_sent = factor.isfinite().all()
each rank owes all ranks' rest: exchange/powersgd.py
- error = item.matrix - approximation / codec.world.size
+ error = item.matrix - approximation
= ranks/test_powersgd.py::test_gradients_are_those_of_torchs_hook[2-3]
each step draws its factors anew: exchange/powersgd.py
- factor = codec.factors.get(key)
+ factor = None
= ranks/test_powersgd.py::test_each_loss_of_a_batch_has_its_own_errors
all losses of a batch share their errors: exchange/powersgd.py
- key, gradient = _Key(part, parameter), bucket.view(flat, number)
+ key, gradient = _Key(0, parameter), bucket.view(flat, number)
= ranks/test_powersgd.py::test_another_number_of_ranks_owes_the_same
more ranks owe more: exchange/powersgd.py
- else tensor.sum(0) / ranks
+ else tensor.mean(0)
= ranks/test_rare.py::test_weights_are_those_of_all_ranks_steps_in_one_process[diloco-SGD-1]
rank 0 alone makes the outer step: exchange/rare.py
- tensor.copy_(self._step(tensor, mean) if tensor in self._anchors else mean)
+ tensor.copy_(self._step(tensor, mean) if self.world.is_main and tensor in self._anchors else mean)
an outer step without momentum: exchange/rare.py
- .mul_(self._momentum).add_(gradient)
+ .mul_(0).add_(gradient)
ranks step by shares of the global mean: exchange/rare.py
- self.divide(backward_pass.part, torch.where(share > 0, share, 1.0))
+ pass
= ranks/test_rare.py::test_weights_are_those_of_all_ranks_steps_in_one_process[local-sgd-AdamW-1]
weights are exchanged, and the optimizers' state is not: runs/prepared.py
- tensors = dict(self._weights()) | optimizer_tensors(self._all, self.optimizers)
+ tensors = dict(self._weights())
= ranks/test_rare.py::test_checkpoints_wait_for_an_exchange_and_continue_with_the_same_bits[diloco-gloo]
the outer momentum begins anew: exchange/rare.py
- for name, tensor in tensors.items()}
+ for name, tensor in ()}
a save brings the ranks together: runs/loop.py
- waits = self.prepared.exchange.drift > 0
+ waits = False
= ranks/test_rare.py::test_evaluations_and_scores_are_of_one_model
each rank evaluates its own weights: sessions/passes.py
- exchange.meet(Call.BEGIN_EVALUATION, self._evaluations)
-         self._prepared.synchronise()
+ exchange.meet(Call.BEGIN_EVALUATION, self._evaluations)
= unit/test_engine.py::test_no_step_reads_a_value[single-mlp]
each step waits for the loss: runs/loop.py
- self.meter.add(step,
+ loss.item()
+         self.meter.add(step,
# a loop of one's own
= ranks/test_session.py::test_a_loop_learns_the_same_on_any_number_of_ranks[classifier-1]
a session takes a mean of the ranks' means: sessions/stepper.py
- return handed.samples / share.total, expected
+ return float(share.size > 0) / self._prepared.world.size, expected
= ranks/test_session.py::test_a_loop_learns_the_same_on_any_number_of_ranks[language_model-1]
a session divides by its own tokens: exchange/batch.py
- total = weights.sum()
+ total = len(weights) * weights[self.exchange.world.rank]
= ranks/test_session.py::test_a_loop_that_is_continued_ends_with_the_same_bits[1-1]
a session that is continued begins its epoch anew: runs/loop.py
- return within
+ return 0
= ranks/test_session.py::test_ranks_whose_data_differ_are_refused_in_their_first_step_and_evaluation
ranks with other data train on: sessions/passes.py
- () if loader.is_compared else loader.compare()
+ ()
= unit/test_compare.py::test_what_lies_between_epochs_is_no_part_of_a_step
an evaluation is a part of a step: compare/clock.py
- self._marks: list[tuple[Any, Any]] = [(None, self._now())]
+ self._marks = getattr(self, "_marks", None) or [(None, self._now())]
= unit/test_forecast.py::test_an_exchange_takes_what_a_ring_or_a_tree_takes
an all-reduce goes around the ring once: compare/timeline.py
- ring_s = 2 * self._around_s
+ ring_s = self._around_s
= unit/test_forecast.py::test_ranks_wait_for_the_slowest_between_any_two_exchanges
ranks wait for the mean one: compare/timeline.py
- / samples) ** ranks
+ / samples)
= unit/test_forecast.py::test_what_computation_and_an_exchange_cost_one_another_counts_while_both_are_under_way
an exchange costs computation nothing: compare/timeline.py
- both_s * cost
+ both_s
= ranks/test_traffic.py::test_sockets_send_the_bytes_of_the_forecast[ddp]
each micro-batch exchanges its gradients: compare/clock.py
- mark() if is_last() else None
+ mark()
= ranks/test_traffic.py::test_sockets_send_the_bytes_of_the_forecast[local-sgd]
a forecast averages no optimizer state: compare/traffic.py
- parameter.bytes + parameter.state_bytes for
+ parameter.bytes for
= ranks/test_traffic.py::test_sockets_send_the_bytes_of_the_forecast[fsdp in pairs]
groups of ranks do not sum their shards: compare/traffic.py
- if size < ranks:
+ if False:
= unit/test_forecast.py::test_memory_is_what_a_method_leaves_to_a_rank
a forecast gathers no block: compare/traffic.py
- + max(blocks.values(), default=0.0)
+ + 0.0
= ranks/test_measured.py::test_a_lone_rank_meets_the_exchanges_that_ranks_make
a forecast sees no BatchNorm: compare/clock.py
- if synchronous(module) is not None:
+ if False:
= ranks/test_measured.py::test_a_lone_rank_meets_the_exchanges_that_ranks_make
gradients are marked after the backward pass: compare/clock.py
- node.register_hook(
+ parameter.register_post_accumulate_grad_hook(
= ranks/test_traffic.py::test_sockets_send_the_bytes_of_the_forecast[fsdp that gathers once]
weights that stay gathered are gathered again: compare/traffic.py
- if profile.reshards else (FORWARD,)
+ if True else (FORWARD,)
= unit/test_session.py::test_steps_that_are_made_once_in_several_batches_are_continued_where_they_stood
a batch without a step is not counted: sessions/stepper.py
- loop.count_batch(handed.place, handed.share.step)
+ loop.count_batch(handed.place, loop.position.step)
= unit/test_session.py::test_gradients_of_a_batch_that_is_left_are_none_of_the_next_one
gradients of a batch that was left stay: sessions/stepper.py
- self._batch.drop()
+ pass
= ranks/test_session.py::test_a_loop_that_fails_in_its_first_step_leaves_no_dispatch_mode
the watcher of draws outlives a loop that has failed: sessions/randomness.py
- self._watch.stop()
+ pass
= ranks/test_memory.py::test_a_rank_that_runs_out_of_memory_later_goes_on_with_smaller_ones
a rank does not tell others that its memory is exhausted: training/memory.py
- return [bool(value) for value in world.stack(torch.tensor(int(flag), device=world.device)).tolist()]
+ return [flag]
records before an exhausted memory are lost: sessions/session.py
- self.loop.record_steps()
+ pass
= ranks/test_profiler.py::test_each_rank_writes_a_trace_and_the_slowest_is_named
the rank that waits most is told as the slowest: runs/profiler.py
- "slowest": min(
+ "slowest": max(
= ranks/test_profiler.py::test_a_failed_run_leaves_no_trace_under_way
a failed run writes a trace: runs/profiler.py
- None if discard else self._write
+ self._write
= unit/test_export.py::test_exported_weights_have_the_bits_of_the_checkpoint
an export has the weights before they are averaged: jobs/export.py
- [*job.groups.values()][-1]
+ [*job.groups.values()][0]
= unit/test_export.py::test_a_program_that_differs_from_the_model_is_not_written
an export that computes something else is written: jobs/export.py
- if not largest <=
+ if False and not largest <=
= unit/test_kubernetes.py::test_a_script_stands_in_place_of_a_recipe_and_its_words_arrive_unchanged
kubernetes puts its own values into words of a script: launchers/kubernetes.py
- word.replace("$", "$$")
+ word
= ranks/test_rendezvous.py::test_an_agent_asks_again_whether_the_address_is_its_own
an agent whose name comes late waits for itself: launchers/nodes.py
- attempt_s=min(left_s, _ASK_AGAIN_S)
+ attempt_s=left_s
= unit/test_session.py::test_what_weighs_nothing_leaves_no_trace_and_losses_may_be_weighed_or_not
a mean over nothing is taken: exchange/batch.py
- return loss * factor if factor else torch.zeros_like(loss)
+ return loss * factor
= unit/test_session.py::test_the_best_weights_are_loaded_at_once_and_the_last_ones_stay_saved
the best weights are looked for before they are saved: runs/loop.py
- self._world.together(self._saver.close)  #
+ #
the best weights are saved as those of the last step: sessions/session.py
- if self._has_left and not loop.is_finished:
+ if False:
= unit/test_session.py::test_a_stop_waits_where_the_epochs_end_has_changed_a_schedule
a stop after a schedule's step is taken at once: sessions/session.py
- stops = stops and (loop.is_finished or
+ stops = stops or (loop.is_finished or
an epoch that is cut short is not told: sessions/passes.py
- position.is_cut = is_within and
+ position.is_cut = False and
= unit/test_engine.py::test_weights_that_nobody_has_scored_are_scored_where_no_step_is_left
a finished run has the scores of another step: jobs/classifier.py
- self._scores = self._score(data.judged)
+ self._scores = Scores(top1=0.0, top5=0.0, loss=0.0, samples=1)
"""
)


def main(names: Sequence[str]) -> int:
    """Try the mutants whose names contain one of `names`; return 1 if one lives, 2 if the tests fail without any."""
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    tests = list(dict.fromkeys(mutant.test for mutant in chosen))
    print(f"{len(tests)} tests on the source as it is …", flush=True)
    code, output = _pytest(ROOT / "src", tests, "-n", str(AT_ONCE))
    if code != 0:
        print(output)
        return 2
    outcomes: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for mutant, (outcome, took_s) in zip(chosen, threads.map(_try, chosen), strict=True):
            print(f"{outcome:<8} {took_s:5.1f} s  {mutant.name}: {mutant.test}", flush=True)
            outcomes.append(outcome)
    caught, skipped = outcomes.count(CAUGHT), sum(outcome.startswith(NOT_TRIED) for outcome in outcomes)
    print(f"{caught} of {len(chosen)} caught, {skipped} not tried")
    return 0 if caught + skipped == len(chosen) else 1


def _try(mutant: Mutant) -> tuple[str, float]:
    """Run the mutant's test on a copy of the source with the defect in it; return the outcome and the seconds."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        broken = mutant.broken(source)
        (source / "lockstep" / mutant.file).write_text(broken, encoding="utf-8")
        code, output = _pytest(source, [mutant.test], "-rs")
    outcome = {0: LIVES, 1: CAUGHT, None: "timed out"}.get(code, f"pytest {code}: {output[-2000:]}")
    if code == 0 and not re.search(r"\d passed", output):
        outcome = f"{NOT_TRIED}: {' '.join(re.findall(r'^SKIPPED .*?: (.*)', output, re.MULTILINE))}"
    return outcome, time.monotonic() - begun_s


def _pytest(source: Path, tests: Sequence[str], *more: str) -> tuple[int | None, str]:
    """Run tests on the lockstep in `source`; return pytest's exit code, None out of time, and what it said."""
    words = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--timeout", "0", "--tb", "short"]
    env = {**os.environ, "PYTHONPATH": str(source), "LOCKSTEP_TEST_SOURCE": str(source), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*words, *more, *(f"tests/{test}" for test in tests)],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S * len(tests))
        code = process.poll()
        if source != ROOT / "src" or code is None:
            for each in [process, *_using(source)]:
                each.kill()
        process.wait()
        output.seek(0)
        return code, output.read()


def _using(source: Path) -> Iterator[psutil.Process]:
    """Yield the processes that run the lockstep in `source`: a mutant may have left some."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("LOCKSTEP_TEST_SOURCE") == str(source):
                yield process


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
