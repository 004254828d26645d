"""A chain of LangChain with a server of yours. ``pipespec serve --target CHAT_MODEL``, then ``python examples/langchain_chat.py http://127.0.0.1:8000``."""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI

url = f"{sys.argv[1]}/v1"
name = OpenAI(base_url=url, api_key="none").models.list().data[0].id
prompt = ChatPromptTemplate([("system", "Answer in one sentence."), ("user", "What is {thing}?")])
chain = prompt | ChatOpenAI(base_url=url, api_key="none", model=name, temperature=0, max_tokens=48) | StrOutputParser()
for piece in chain.stream({"thing": "a futex"}):
    print(piece, end="", flush=True)
print()
