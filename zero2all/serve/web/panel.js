// The panel beside a token: how likely it was, and what else it could have been.

import { h } from './dom.js';
import { percent, visible } from './tokentext.js';
import { hex, probability } from './tokens.js';
import { t } from './words.js';

const SHOW_AFTER = 80; // milliseconds the mouse rests on a token
const HIDE_AFTER = 300; // time to move from the token into the panel
const WIDTH = 300;

const label = ({ text, bytes }) => (text === null ? hex(bytes) : visible(text));
const CONTROL = /^(<\|.*\|>|<\/?s>)$/; // such as the end of the text: what is spelled like this in a prompt is not it

export class Panel {
	constructor() {
		this.root = h('div', { class: 'alternatives', role: 'group', hidden: true, onpointerenter: () => clearTimeout(this.timer), onpointerleave: () => this.leave() });
		this.isPinned = false;
	}

	get isOpen() {
		return !this.root.hidden;
	}

	// `take` is called with an alternative of the first token, where the text can go on from there; `accepts` says with which.
	show({ anchor, host, cluster, take = null, accepts = () => true, pin = false }) {
		clearTimeout(this.timer);
		this.isPinned = pin;
		this.anchor?.classList.remove('active');
		this.anchor = anchor;
		anchor.classList.add('active');
		this.root.ariaLabel = t('alternatives');
		this.root.replaceChildren(...cluster.tokens.filter(({ bytes }) => bytes.length).map((token, i, all) => this.section(token, i, all, cluster, take, accepts)));
		if (this.root.parentNode !== host) host.append(this.root);
		this.root.hidden = false;
		this.place(anchor, host);
	}

	place(anchor, host) {
		const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
		const frame = host.getBoundingClientRect();
		const isAbove = at.bottom + this.root.offsetHeight > innerHeight && at.top > this.root.offsetHeight;
		const top = isAbove ? at.top - this.root.offsetHeight : at.bottom;
		const left = Math.max(0, Math.min(at.left - frame.left, frame.width - WIDTH));
		for (const [name, value] of [['--top', top - frame.top], ['--left', left]]) this.root.style.setProperty(name, `${value}px`);
	}

	section(token, i, all, cluster, take, accepts) {
		const listed = token.alternatives.some((other) => label(other) === label(token)) ? [] : [token];
		const rows = [...token.alternatives, ...listed].sort((a, b) => b.logprob - a.logprob);
		const rest = Math.max(0, 1 - rows.reduce((sum, each) => sum + probability(each), 0));
		return h('section', {},
			h('p', { class: 'about' }, h('b', {}, label(token)), ' ', percent(probability(token))),
			all.length > 1 ? h('p', { class: 'hint' }, t('partOf', { number: i + 1, total: all.length, text: cluster.text })) : null,
			token.text === null ? h('p', { class: 'hint' }, t('bytes', { hex: hex(token.bytes) })) : null,
			h('ol', {}, rows.map((each) => this.row(each, label(each) === label(token), i === 0 && accepts(each) ? take : null)),
				h('li', { class: 'rest' }, this.bar(t('others'), rest))),
			i === all.length - 1 ? h('p', { class: 'hint' }, t('asGiven')) : null);
	}

	row(each, isChosen, take) {
		const isText = each.text && !CONTROL.test(each.text);
		const canTake = take && isText && !isChosen;
		const title = canTake ? t('takeIt', { name: `“${label(each)}”` }) : isText ? null : t('notText');
		const content = this.bar(label(each), probability(each));
		return h('li', { class: isChosen ? 'chosen' : '', title },
			canTake ? h('button', { title, onclick: () => { this.hide(); take(each); } }, content) : content);
	}

	bar(name, share) {
		const scale = h('i', { vars: { '--share': share } });
		return [h('span', { class: 'name' }, name), h('span', { class: 'scale' }, scale), h('span', { class: 'share' }, percent(share))];
	}

	hide() {
		clearTimeout(this.timer);
		const hadFocus = this.root.contains(document.activeElement);
		this.root.hidden = true;
		this.isPinned = false;
		this.anchor?.classList.remove('active');
		if (hadFocus) this.anchor.focus();
	}

	// The mouse rests on something, or leaves it; a pinned panel stays.
	rest(what) {
		clearTimeout(this.timer);
		if (!this.isPinned) this.timer = setTimeout(() => this.show(what()), SHOW_AFTER);
	}

	leave() {
		clearTimeout(this.timer);
		if (!this.isPinned && !this.root.contains(document.activeElement)) this.timer = setTimeout(() => this.hide(), HIDE_AFTER);
	}
}
