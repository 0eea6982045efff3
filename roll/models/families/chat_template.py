"""Built-in chat templates: what they are, how a simple one is written, and the one that belongs to no family."""

from __future__ import annotations

from dataclasses import dataclass

NATIVE, NONE = "native", "none"
"""Values of `data_args.template` that name no template here: the tokenizer's own, and the text unchanged."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template that does not depend on the tokenizer's own.

    Attributes:
        jinja: the template, in the Jinja format of Hugging Face tokenizers.
        markers: its special tokens. A tokenizer that lacks one would encode it as plain text.
    """

    jinja: str
    markers: tuple[str, ...]


TOOLS = (
    "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\\n<tools>{{ LIST }}\\n</tools>\\n\\nFor each function call, "
    "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
"""How Hermes and Qwen are shown tools."""

TOOL_LIST = "{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"

CALLS = (
    "{% for each in message.tool_calls or [] %}{% set call = each.function or each %}"
    "{{ '\\n' if message.content or not loop.first }}{{ '<tool_call>\\n{\"name\": ' }}{{ call.name | tojson }}"
    "{{ ', \"arguments\": ' }}{{ call.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
"""Tool calls of a message of the assistant, after its content."""

RESULT = "{{ '<tool_response>\\n' }}{{ message.content }}{{ '\\n</tool_response>' }}"


def turns(opening: str, closing: str, system: str = "") -> str:
    """A template whose turns are alike; ROLE in `opening` stands for the role of a message.

    Tools are shown in the form of Hermes: in the message of the system, which begins with `system` where there is
    none; the answers of tools are messages of the user, several in one.
    """

    def opened(role: str) -> str:
        return opening.replace("ROLE", role)

    before, after = TOOLS.split("{{ LIST }}")
    tools = f'{{{{ "{before}" }}}}{TOOL_LIST}{{{{ "{after}" }}}}'
    own = f'{{{{ "{system}\\n\\n" }}}}' if system else ""
    return (
        "{% set calls = tools or (messages | selectattr('tool_calls') | list) %}"
        "{% if tools %}" + opened("system") + "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
        "{{ '\\n\\n' }}{% else %}" + own + "{% endif %}" + tools + closing + "{% endif %}"
        "{% for message in messages %}{% if calls and message.role == 'tool' %}"
        "{% if loop.first or loop.previtem.role != 'tool' %}"
        + opened("user")
        + "{% else %}{{ '\\n' }}{% endif %}"
        + RESULT
        + "{% if loop.last or loop.nextitem.role != 'tool' %}"
        + closing
        + "{% endif %}"
        "{% elif not (tools and loop.first and message.role == 'system') %}"
        + opened("{{ message.role }}")
        + "{{ message.content }}"
        + CALLS
        + closing
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + opened("assistant")
        + "{% endif %}"
    )


CHATML = ChatTemplate(turns("<|im_start|>ROLE\n", "<|im_end|>\n"), ("<|im_start|>", "<|im_end|>"))
