"""A graph of LangGraph, as a program: `command: [PYTHON, langgraph_graph.py, "{task_file}"]`.

PYTHON is that of an environment with the packages `langgraph` and `langchain-openai`.
"""

import json
import sys
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool  # type: ignore[untyped-decorator]
def multiply(left: int, right: int) -> int:
    """Multiplies two numbers."""
    return left * right


model = ChatOpenAI(model="policy").bind_tools([multiply])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([multiply]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")

task = json.loads(Path(sys.argv[1]).read_text())
state = graph.compile().invoke({"messages": [("user", task["question"])]}, {"recursion_limit": 10})
print(json.dumps({"reward": float(state["messages"][-1].content.strip() == task["answer"])}))
