"""The words of the page in English and Simplified Chinese; the page shows those of the reader's language."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field

TEXTS: Mapping[str, tuple[str, str]] = {
    # Parts of the page
    "curves": ("Curves", "曲线"),
    "lengths": ("Lengths", "长度"),
    "time": ("Time", "时间"),
    "freshness": ("Freshness", "新鲜度"),
    "samples": ("Samples", "样本"),
    "configuration": ("Configuration", "配置"),
    "language": ("中文", "English"),
    "all_metrics": ("All metrics", "全部指标"),
    # Header and key figures
    "finished": ("finished", "已完成"),
    "running": ("running", "运行中"),
    "interrupted": ("interrupted", "已中断"),
    "failed": ("failed", "失败"),
    "died": ("died", "已终止"),
    "waiting": ("waiting", "等待中"),
    "steps": ("{steps} steps", "{steps} 步"),
    "platform": ("{platform}, {devices} devices", "{platform}，{devices} 个设备"),
    "algorithm": ("{loss}, {estimator}, ratio {ratio}", "{loss}，{estimator}，异步比 {ratio}"),
    "seed": ("seed {seed}", "种子 {seed}"),
    "seconds": ("{minutes} min {seconds} s", "{minutes} 分 {seconds} 秒"),
    "validation": ("Validation score", "验证得分"),
    "validations": ("{count} validations", "{count} 次验证"),
    "reward": ("Reward", "奖励"),
    "batch_mean": ("mean of the batch", "批次均值"),
    "loss": ("Training loss", "训练损失"),
    "step": ("Step", "每步时间"),
    "rate": ("{rate} tokens/s and device", "每设备每秒 {rate} 词元"),
    "idle": ("Trainer idle", "训练空闲"),
    "engines_idle": ("engines idle {idle}", "引擎空闲 {idle}"),
    "staleness": ("Staleness", "滞后"),
    "staleness_max": ("at most {most}; effective samples {ess}", "最大 {most}；有效样本 {ess}"),
    "dropped": ("Prompts dropped", "丢弃的提示"),
    "submitted": ("of {count} submitted", "共提交 {count}"),
    "absent": ("not recorded", "未记录"),
    # Empty states
    "no_steps": (
        "No step has finished. metrics.jsonl gets a line with each step.",
        "尚无完成的训练步。每完成一步，metrics.jsonl 增加一行。",
    ),
    "no_samples": (
        "No samples were kept. rollout_dump_steps says how many steps keep them.",
        "没有保存样本。rollout_dump_steps 决定保存多少步的样本。",
    ),
    "no_config": ("run.json cannot be read, so the configuration is not known.", "无法读取 run.json，配置未知。"),
    "no_time": ("No step has a time.", "没有记录任何一步的时间。"),
    "no_spans": ("Spans were not recorded: spans.jsonl is missing.", "没有记录时间段：缺少 spans.jsonl。"),
    "no_groups": ("Groups were not recorded: groups.jsonl is missing.", "没有记录样本组：缺少 groups.jsonl。"),
    "remark": ("Left out: {what}", "已略过：{what}"),
    # Time
    "lanes": (
        "Who did what; one row for the trainer, the rollout process and each engine",
        "各进程的时间线：训练器、采样进程与每个引擎",
    ),
    "lanes_left": ("{count} more engines are not shown", "另有 {count} 个引擎未显示"),
    "steps_shown": ("steps shown", "显示的步数"),
    "first_step": ("first step", "起始步"),
    "all": ("all", "全部"),
    "perfetto": ("Save for ui.perfetto.dev", "保存供 ui.perfetto.dev 使用"),
    "h_age": ("Age of the samples in weight versions, by step", "样本的权重版本滞后（按步）"),
    "h_length": ("Response length in tokens, by step", "回答长度（词元，按步）"),
    "h_score": ("Mean score by response length", "各回答长度的平均得分"),
    "reasons": ("Dropped prompts", "丢弃的提示"),
    "no_drops": ("No prompt was dropped.", "没有提示被丢弃。"),
    "drop_example": ("last {name}, step {step}: {cause}", "最近一次 {name}，第 {step} 步：{cause}"),
    "no_cause": ("no failure", "无故障"),
    "time_title": ("Where the time of the steps went", "每步时间的去向"),
    "wait": ("wait for samples", "等待样本"),
    "log_probs": ("log-probs", "对数概率"),
    "train": ("train", "训练"),
    "update": ("weight update", "权重更新"),
    "val": ("validation", "验证"),
    "checkpoint": ("checkpoint", "检查点"),
    "hand_over": ("hand-over", "设备交接"),
    "other": ("other", "其他"),
    # Samples
    "step_number": ("step", "步"),
    "weighing": (
        "Groups by their share of |advantage| x (1 - probability), which bounds the gradient of the logits.",
        "按各组 |优势| x (1 - 概率) 的占比排序，它限定 logits 的梯度。",
    ),
    "constant": ("constant", "恒定"),
    "no_text": ("No group of this step has samples.", "该步没有样本。"),
    "tint_advantage": ("advantage", "优势"),
    "tint_ratio": ("log ratio", "对数比"),
    "tint_entropy": ("entropy", "熵"),
    "tint_version": ("version", "版本"),
    # Configuration
    "keys_given": ("{given} keys given, all others at their defaults", "给出 {given} 个键，其余为默认值"),
    "keys_differ": ("keys and versions that differ", "不同的键与版本"),
    "same_keys": ("All keys and versions are equal.", "所有键与版本都相同。"),
    # The live page
    "live_running": ("Live, last change at", "实时，最近更新于"),
    "live_ended": ("The run has ended.", "运行已结束。"),
    "live_waiting": (
        "No run here yet; the page appears with its first file.",
        "此目录中尚无运行；写入第一个文件后页面即会出现。",
    ),
    "live_replaced": (
        "Another run was started in this folder; this page is of the one before.",
        "此目录中已开始另一次运行；本页显示之前的运行。",
    ),
    "live_reload": ("Show the new run", "显示新的运行"),
    "live_gone": (
        "The files of the run are gone; this page shows what they said last.",
        "运行的文件已不存在；本页显示其最后内容。",
    ),
    "live_lost": ("roll watch has ended; this page no longer changes.", "roll watch 已结束；本页不再更新。"),
    # Findings
    "f_failed": ("The run {status}. Last event: {event}", "运行{status}。最后事件：{event}"),
    "f_died": (
        "The driver reported nothing for longer than it may. Look at logs/driver.log.",
        "驱动进程超时未报告。请查看 logs/driver.log。",
    ),
    "f_nan": (
        "{metric} was not finite from step {step} on. Lower the learning rate or max_grad_norm.",
        "{metric} 自第 {step} 步起不是有限值。请降低学习率或 max_grad_norm。",
    ),
    "f_learned": ("Validation rose from {first} to {last}.", "验证得分从 {first} 升至 {last}。"),
    "f_flat": (
        "Validation did not rise: {first} at first, {last} at the end, {noise} of noise.",
        "验证得分没有上升：开始 {first}，结束 {last}，噪声 {noise}。",
    ),
    "f_fell": (
        "Validation fell from {best} at step {step} to {last}. A checkpoint near step {step} is the better model.",
        "验证得分从第 {step} 步的 {best} 降至 {last}。第 {step} 步附近的检查点更好。",
    ),
    "f_nothing": (
        "{share} of the groups have equal scores and the reward stays {reward}. Read the samples: template, tokenizer "
        "or reward may not fit the model.",
        "{share} 的组得分相同，奖励一直为 {reward}：请查看样本；模板、分词器或奖励可能与模型不匹配。",
    ),
    "f_no_gradient": (
        "{share} of groups gave no gradient at the end: all their scores are equal. Use harder or easier prompts, or "
        "rewards.<name>.query_filter_config.",
        "结束时 {share} 的组没有梯度：组内得分全部相等。请调整题目难度，或使用 rewards.<name>.query_filter_config。",
    ),
    "f_length": (
        "Reward and length rose together (correlation {r}) and responses grew {times} times. Look at the longest ones: "
        "the reward may pay for length.",
        "奖励与长度同升（相关 {r}），回答变长 {times} 倍。请查看最长的回答：奖励可能在鼓励长度。",
    ),
    "f_hacked": (
        "The reward rose by {reward} while validation fell by {val}. The reward no longer measures the task.",
        "奖励上升 {reward}，验证却下降 {val}。奖励不再衡量任务。",
    ),
    "f_part": (
        "Reward part {part} rose by {rise} while validation fell by {val}.",
        "奖励分量 {part} 上升 {rise}，验证却下降 {val}。",
    ),
    "f_tag": (
        "{tag} moved against the others: {first} to {last}. Look at the reward of this tag.",
        "{tag} 与其他相反：{first} 变为 {last}。请检查该标签的奖励。",
    ),
    "f_entropy_low": (
        "Entropy fell to {last} nats from {first}: the policy repeats itself. Lower the learning rate, or use "
        "entropy_loss_coef.",
        "熵从 {first} 降至 {last} nats：策略趋于重复。请降低学习率，或使用 entropy_loss_coef。",
    ),
    "f_entropy_high": (
        "Entropy rose from {first} to {last} nats: the policy becomes random. Lower the learning rate.",
        "熵从 {first} 升至 {last} nats：策略趋于随机。请降低学习率。",
    ),
    "f_ess": (
        "Only {ess} of the samples count after correction (correction/ess). Lower async_generation_ratio.",
        "修正后只有 {ess} 的样本有效 (correction/ess)。请降低 async_generation_ratio。",
    ),
    "f_mismatch": (
        "Engine and trainer disagree on fresh samples: {value} on average at age 0. Compare their tokenizer, sampling "
        "options and dtype.",
        "引擎与训练器在新样本上不一致：滞后为 0 时平均 {value}。请比较两者的分词器、采样选项与数据类型。",
    ),
    "f_far": (
        "The policy moved far from the one that sampled: k3 {k3} at step {step}. Lower the learning rate.",
        "策略远离采样策略：第 {step} 步 k3 为 {k3}。请降低学习率。",
    ),
    "f_norm": (
        "The gradient norm reached {most} at step {step}, {times} times its median. Look at the samples of that step.",
        "第 {step} 步梯度范数达到 {most}，为中位数的 {times} 倍。请查看该步的样本。",
    ),
    "f_cut": (
        "{share} of responses were cut at response_length {length}. Raise it, or penalise length.",
        "{share} 的回答在 response_length {length} 处被截断。请增大它，或惩罚长度。",
    ),
    "f_flipped": (
        "Responses of tag {tag} with the ground truth score {right}, others {others}. Its reward may be flipped.",
        "标签 {tag} 中包含标准答案的回答得分 {right}，其余为 {others}。奖励可能被颠倒。",
    ),
    "f_engine": (
        "Engine {engine} is {value} from the trainer's log-probs in step {step}, the others {others}. Its weights are "
        "not those of its version: verify_weights checks every update.",
        "第 {step} 步引擎 {engine} 与训练器对数概率相差 {value}，其他引擎为 {others}。"
        "其权重与版本不符：verify_weights 可检查每次更新。",
    ),
    "f_truncated": (
        "Sampled tokens are {gap} nats more likely than the policy's own (entropy {entropy}). Sampling is truncated: "
        "see top_p and top_k of actor_infer.generating_args.",
        "采样词元比策略自身分布高 {gap} 奈特（熵 {entropy}）。采样被截断："
        "请检查 actor_infer.generating_args 的 top_p 与 top_k。",
    ),
    "f_drops": ("{share} of prompts were dropped, most for {reason}.", "{share} 的提示被丢弃，主要原因 {reason}。"),
    "f_idle": ("{who} idle {idle} of the time. {advice}", "{who}有 {idle} 的时间空闲。{advice}"),
    "who_trainer": ("The trainer was", "训练器"),
    "who_engines": ("The engines were", "引擎"),
    "f_slow": (
        "Step {step} took {seconds} s, {times} times the median; most of it was {part}.",
        "第 {step} 步用了 {seconds} 秒，为中位数的 {times} 倍；主要是{part}。",
    ),
    "f_few": (
        "Half of the weight of step {step} is in {samples} of {total} samples.",
        "第 {step} 步一半的权重集中在 {total} 个样本中的 {samples} 个。",
    ),
    "f_same": (
        "{share} of the responses of step {step} are the same text. The policy has collapsed.",
        "第 {step} 步有 {share} 的回答文本相同。策略已坍塌。",
    ),
    "f_faults": ("{count} faults were survived; the last: {event}", "经历了 {count} 次故障；最后一次：{event}"),
    "f_ok": (
        "Nothing failed: no event was recorded and no prompt was dropped.",
        "没有故障：没有事件记录，也没有提示被丢弃。",
    ),
}


@dataclass(frozen=True)
class Text:
    """A text by its key in TEXTS, with the values of its fields; a value may be a text itself."""

    key: str
    values: Mapping[str, object] = field(default_factory=dict)

    def in_language(self, index: int) -> str:
        """The text in English (0) or Chinese (1)."""
        values = {name: v.in_language(index) if isinstance(v, Text) else str(v) for name, v in self.values.items()}
        return TEXTS[self.key][index].format(**values)

    def html(self) -> str:
        """Both languages as escaped HTML, of which the page shows one."""
        return bilingual(self.in_language(0), self.in_language(1))


def text(key: str, **values: object) -> Text:
    return Text(key, values)


def bilingual(english: str, chinese: str) -> str:
    """Two texts as escaped HTML, of which the page shows one."""
    english, chinese = html.escape(english), html.escape(chinese)
    return english if english == chinese else f"<span lang=en>{english}</span><span lang=zh>{chinese}</span>"


def digits(value: float) -> str:
    """Three significant digits; thousands with separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
