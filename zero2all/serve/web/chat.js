// Chat: messages and answers.

import { Answer } from './answer.js';
import { post } from './api.js';
import { byId, h, later } from './dom.js';
import { readoutLine, showReadout } from './readout.js';
import { asCode, copy, saveJson, saveMarkdown } from './save.js';
import { change, state } from './state.js';
import * as store from './store.js';
import { TokenText } from './tokentext.js';
import { action, failure, tool } from './tools.js';
import { t } from './words.js';

// Code between fences is set as code; all the rest is text as it came.
function prose(text) {
	return text.split(/^```[^\n`]*(?:\n|$)/m).map((part, i) => part && h(i % 2 ? 'pre' : 'div', { class: i % 2 ? 'code' : 'prose' }, part.replace(/\n$/, '')));
}

// Enter while an input method is choosing characters belongs to it.
const isEnter = (event) => event.key === 'Enter' && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

const MOST_TURNS = 8; // of one answer: each but the last calls functions

export class Chat {
	constructor(panel, onHistory) {
		this.panel = panel;
		this.onHistory = onHistory;
		this.model = null;
		this.answer = null; // the newest of this page; not over while it is written
		this.editing = null; // {place, text} of the message that is being edited
		this.keep = () => { this.isKept = store.keep(this.conversation); };
		this.keepSoon = later(() => this.keep(), 300);
		this.list = h('div', { class: 'messages', role: 'log' });
		this.notes = h('div');
		this.box = h('textarea', { id: 'message', rows: 2, oninput: () => this.onInput(), onkeydown: (event) => { if (isEnter(event)) { event.preventDefault(); this.send(); } } });
		this.tools = h('div', { class: 'tools-line' });
		this.line = readoutLine();
		this.root = h('div', { class: 'chat' }, this.list, this.notes, h('div', { class: 'composer' }, this.box, this.tools, this.line));
		this.list.addEventListener('pointerover', (event) => this.onToken(event, (what) => this.panel.rest(() => what)));
		this.list.addEventListener('pointerout', () => this.panel.leave());
		this.list.addEventListener('focusin', (event) => this.onToken(event, (what) => this.panel.isPinned || this.panel.show(what)));
		this.list.addEventListener('click', (event) => this.onToken(event, (what) => this.panel.show({ ...what, pin: true })));
		this.open(store.load(state.conversation) ?? store.create());
	}

	get isWriting() {
		return this.answer !== null && !this.answer.isOver;
	}

	open(conversation) {
		this.stop();
		this.conversation = conversation;
		this.answer = null;
		this.editing = null;
		this.box.value = conversation.draft;
		if (state.conversation !== conversation.id) change({ conversation: conversation.id });
		this.draw();
	}

	// ---- what the person does ----

	onInput() {
		this.conversation.draft = this.box.value;
		this.keepSoon();
		this.drawTools();
	}

	send() {
		const text = this.box.value;
		if (!text.trim() || this.isWriting || !this.model) return;
		this.conversation.messages.push({ role: 'user', content: text });
		this.box.value = this.conversation.draft = '';
		this.ask();
	}

	stop() {
		if (this.isWriting) this.answer.stop();
	}

	regenerate() {
		this.stop();
		const { messages } = this.conversation;
		const replaced = messages.at(-1)?.role === 'assistant' ? messages.pop() : null;
		if (messages.length) this.ask(null, replaced?.content ? replaced : null);
	}

	// The words come back into the box, unless something else was begun there.
	undo() {
		this.stop();
		const { messages } = this.conversation;
		const [last] = messages.splice(messages.findLastIndex(({ role }) => role === 'user'));
		if (last && !this.box.value.trim()) this.box.value = this.conversation.draft = last.content;
		this.answer = null;
		this.keep();
		this.draw();
		this.box.focus();
	}

	// The answer once more, with another token at one place. What it replaces is not lost.
	take(message, cluster, alternative) {
		const { messages } = this.conversation;
		const seen = this.tokensOf(message);
		const place = seen.findIndex((each) => each.cluster === cluster);
		const text = cluster.owner.added(cluster, alternative);
		const taken = { ...cluster, text, tokens: [{ ...alternative, alternatives: cluster.tokens[0].alternatives }] };
		const kept = [...seen.slice(0, place), { ...seen[place], text, cluster: taken }].filter((each) => each.text);
		messages.splice(messages.indexOf(message));
		this.ask({ text: kept.map((each) => each.text).join(''), seen: kept, thought: message.reasoning_content }, message);
	}

	// Those of the beginning that was given, and those written after it; null without probabilities.
	tokensOf({ begun, answer }) {
		const seen = answer?.seen();
		return seen && begun ? [...begun.seen, ...seen] : seen;
	}

	previous() {
		const { messages } = this.conversation;
		messages.push(messages.pop().replaced);
		this.answer = messages.at(-1).answer ?? null;
		this.keep();
		this.draw();
	}

	beginEdit(place) {
		this.editing = { place, text: this.conversation.messages[place].content };
		this.draw();
		byId('editing').focus();
	}

	edit(place, text) {
		this.stop();
		const { messages } = this.conversation;
		messages.splice(place);
		messages.push({ role: 'user', content: text });
		this.ask();
	}

	// `begun` is {text, seen}: what the answer begins with, and its tokens.
	async ask(begun = null, replaced = null) {
		const { conversation } = this;
		this.editing = null;
		const { system } = state.settings;
		// A message that got no answer is not sent again, as in the terminal.
		const isEmpty = ({ role, content, tool_calls: calls }) => role !== 'tool' && !content && !calls;
		const said = conversation.messages.filter((message, place, all) => !isEmpty(message) && !(all[place + 1] && isEmpty(all[place + 1]))).map(store.said);
		const messages = [...(system.trim() ? [{ role: 'system', content: system }] : []), ...said];
		const content = { messages };
		if (begun?.text) {
			messages.push({ role: 'assistant', content: begun.text, reasoning_content: begun.thought });
			content.continue_final_message = true;
		}
		const answer = (this.answer = new Answer());
		const message = { role: 'assistant', content: begun?.text ?? '', reasoning_content: begun?.thought, seed: answer.seed, answer, begun, replaced };
		conversation.messages.push(message);
		conversation.time = Date.now();
		this.keep();
		this.draw();
		this.onHistory();
		this.toEnd();
		await answer.write(this.model, content, () => {
			message.content = (begun?.text ?? '') + answer.text;
			message.reasoning_content = (begun?.thought ?? '') + answer.thought || undefined;
			if (answer.calls.length) message.tool_calls = answer.calls;
			message.dropped = answer.dropped;
			message.finish = answer.isOver ? answer.state : undefined;
			this.drawSoon();
		});
		if (conversation === this.conversation) this.keep();
		else store.keep(conversation);
		if (answer.state === 'tool_calls' && answer === this.answer) await this.call(message);
	}

	// What the functions answer; then the model goes on.
	async call({ tool_calls: calls, answer }) {
		const { messages } = this.conversation;
		const results = await Promise.all(calls.map(async ({ id, function: { name, arguments: given } }) => {
			const { content } = await post(`v1/tools/${encodeURIComponent(name)}`, given).catch((error) => ({ content: `error: ${error.message}` }));
			return { role: 'tool', tool_call_id: id, content };
		}));
		if (answer !== this.answer) return; // meanwhile the person did something else
		messages.push(...results);
		const turns = messages.slice(messages.findLastIndex(({ role }) => role === 'user')).filter(({ tool_calls: made }) => made).length;
		if (turns < MOST_TURNS) await this.ask();
		else this.draw();
	}

	// ---- what is seen ----

	drawSoon() {
		this.frame ??= requestAnimationFrame(() => {
			this.frame = null;
			const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 60;
			if (this.answer?.isOver) this.draw();
			else this.drawNewest();
			if (isAtEnd) this.toEnd();
		});
	}

	toEnd() {
		scrollTo(0, document.documentElement.scrollHeight);
	}

	draw() {
		const { messages } = this.conversation;
		this.panel.hide();
		this.list.ariaLabel = t('chat');
		this.list.replaceChildren(...messages.map((message, place) => this.item(message, place)));
		this.list.hidden = !messages.length;
		this.drawNotes();
		this.drawTools();
		showReadout(this.line, this.answer, this.model);
	}

	// Only the message that grows.
	drawNewest() {
		const message = this.conversation.messages.at(-1);
		if (message?.answer === this.answer) this.drawBody(message);
		showReadout(this.line, this.answer, this.model);
	}

	drawNotes() {
		const notes = [];
		if (!this.conversation.messages.length) {
			notes.push(h('div', { class: 'blank' }, h('h2', {}, t('empty')), h('p', {}, t({ frame: 'frame', plain: 'plain' }[this.model?.z2a?.chat] ?? 'noHistory'))));
		}
		if (this.isKept === false) notes.push(h('p', { class: 'notice warn', role: 'alert' }, t('notKept')));
		this.notes.replaceChildren(...notes);
	}

	drawTools() {
		const { messages } = this.conversation;
		this.box.ariaLabel = t('message');
		this.box.placeholder = t('messageHint');
		this.box.title = t('messageKeys');
		const main = this.isWriting
			? action('stopIt', () => this.stop())
			: action('send', () => this.send(), { disabled: !this.box.value.trim() });
		const hasSome = messages.length > 0;
		const others = [
			hasSome && tool('regenerate', () => this.regenerate(), { disabled: this.isWriting }),
			messages.at(-1)?.replaced && tool('previous', () => this.previous(), { disabled: this.isWriting }),
			hasSome && tool('undo', () => this.undo()),
			hasSome && tool('saveJson', () => saveJson(this.model, messages)),
			hasSome && tool('saveMarkdown', () => saveMarkdown(this.model, messages)),
		];
		this.tools.replaceChildren(...others.filter(Boolean), h('span', { class: 'keys hint' }, t('messageKeys')), main);
	}

	item(message, place) {
		const isUser = message.role === 'user';
		message.body = h('div', { class: 'body' });
		message.spans = null;
		const tools = [tool('copy', () => copy(message.content)), isUser && tool('edit', () => this.beginEdit(place))];
		const item = h('article', { class: `message ${message.role === 'tool' ? 'result' : message.role}`, 'aria-busy': message.answer && !message.answer.isOver ? 'true' : null },
			h('header', {}, h('b', {}, { user: t('you'), tool: t('result') }[message.role] ?? this.model?.id ?? '…'), h('span', { class: 'message-tools' }, tools)));
		if (place === this.editing?.place) item.append(this.editor());
		else {
			message.aside = h('div');
			item.append(message.aside, message.body, ...(message.tool_calls ?? []).map((call) => h('div', { class: 'call code' }, asCode(call))));
			this.drawBody(message);
			if (message.dropped) item.append(h('p', { class: 'hint' }, t('dropped', { count: message.dropped })));
			const { error, isTooLong } = message.answer ?? {};
			if (error) item.append(failure(error, isTooLong ? tool('edit', () => this.beginEdit(place - 1)) : tool('tryAgain', () => this.regenerate())));
		}
		return item;
	}

	drawBody(message) {
		const { body, answer, aside, reasoning_content: thought } = message;
		if (thought && !aside.firstChild) aside.append(h('details', { class: 'thought', open: true }, h('summary', {}, t('thought')), h('div', { class: 'prose' })));
		if (thought) aside.querySelector('.prose').textContent = thought;
		const seen = state.probabilities ? this.tokensOf(message) : null;
		if (seen) {
			if (!message.spans) body.replaceChildren();
			message.spans ??= new TokenText(body, { buttons: true });
			body.classList.add('prose');
			message.spans.update(seen);
			return;
		}
		message.spans = null;
		body.classList.remove('prose');
		body.replaceChildren(...prose(message.content).filter(Boolean));
		if (state.probabilities && message.role === 'assistant' && message.content && !answer?.clusters) body.append(h('p', { class: 'hint' }, t('notRecorded')));
	}

	editor() {
		const { editing } = this;
		const again = () => editing.text.trim() && this.edit(editing.place, editing.text);
		const area = h('textarea', {
			id: 'editing', value: editing.text, rows: 3, 'aria-label': t('edit'), oninput: () => { editing.text = area.value; },
			onkeydown: (event) => {
				if (event.key === 'Escape' && !event.isComposing) close();
				else if (isEnter(event)) { event.preventDefault(); again(); }
			},
		});
		const close = () => { this.editing = null; this.draw(); };
		return h('div', { class: 'editor' }, area, h('div', { class: 'tools-line' }, tool('cancel', close), action('editSend', again)));
	}

	onToken(event, show) {
		const anchor = event.target.closest?.('.token');
		if (!anchor?.cluster) return;
		const { cluster } = anchor;
		const host = anchor.closest('.message');
		const message = this.conversation.messages.find(({ body }) => body?.parentNode === host);
		const take = this.isWriting ? null : (alternative) => this.take(message, cluster, alternative);
		show({ anchor, host, cluster, take, accepts: (alternative) => cluster.owner.added(cluster, alternative) !== null });
	}
}
