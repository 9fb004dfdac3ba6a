"""Two small chat templates for tokenizers that come without one.

`chatml` is the common form with marks for turns, which a tokenizer should know as tokens; `plain` needs nothing but an
end of text. Both mark what the assistant writes.
"""

from __future__ import annotations

from armillary.model.text.train_tokenizer import CHAT_TEMPLATE

PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- 'Assistant:' }}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}
"""
"""The space before an answer belongs to it: a word and the space before it are usually one token."""

TEMPLATES = {"chatml": CHAT_TEMPLATE, "plain": PLAIN}
"""what data.template takes besides files"""
