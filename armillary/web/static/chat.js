// The chat box: sends the conversation to the server in the form above, and shows the answer while it is written.
"use strict";
const talk = document.getElementById("talk");
const ask = document.getElementById("ask");
const say = document.getElementById("say");
const messages = [];
document.getElementById("chat").hidden = false;

function bubble(role, text) {
  const place = document.createElement("p");
  place.className = role;
  place.dir = "auto";
  place.textContent = text;
  talk.append(place);
  talk.scrollTop = talk.scrollHeight;
  return place;
}

function piece(line) {
  if (!line.startsWith("data: ") || line === "data: [DONE]") return "";
  const event = JSON.parse(line.slice(6));
  if (event.error) throw new Error(event.error.message);
  return event.choices.length ? event.choices[0].delta.content || "" : "";
}

async function read(answer, place) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return text;
    const lines = (held + value).split("\n");
    held = lines.pop();
    text += lines.map(piece).join("");
    place.textContent = text;
    talk.scrollTop = talk.scrollHeight;
  }
}

async function send(text) {
  bubble("own", text);
  messages.push({ role: "user", content: text });
  const place = bubble("answer", "…");
  try {
    const answer = await fetch("chat", {
      method: "POST",
      headers: { "content-type": "application/json", "x-csrf-token": document.querySelector("header").dataset.csrf },
      body: JSON.stringify({ url: document.getElementById("url").value, key: document.getElementById("key").value, messages }),
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    messages.push({ role: "assistant", content: await read(answer, place) });
  } catch (error) {
    messages.pop();
    place.className = "error";
    place.textContent = error.message;
  }
}

ask.addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = say.value.trim(), button = ask.querySelector("button");
  if (!text || button.disabled) return;
  say.value = "";
  button.disabled = true;
  await send(text);
  button.disabled = false;
  say.focus();
});
say.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask.requestSubmit();
});
