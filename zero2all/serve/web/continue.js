// Continue: one text, which the model goes on with. What it wrote has another colour.
//
// The text is edited in a text area whose own letters are not seen; behind it, letter by letter at the same place, lies
// the same text in colours.

import { Answer } from './answer.js';
import { h, later } from './dom.js';
import { readoutLine, showReadout } from './readout.js';
import { copy, saveText, saveTextJson } from './save.js';
import { read, state, write } from './state.js';
import { TokenText } from './tokentext.js';
import { action, failure, tool } from './tools.js';
import { t } from './words.js';

const KEPT = 'z2a-talk-text';
const MOST_UNDONE = 100;

export class Continue {
	constructor(panel) {
		this.panel = panel;
		this.model = null;
		this.answer = null;
		const kept = read(KEPT);
		this.text = kept?.text ?? '';
		this.marks = kept?.marks ?? []; // {start, length, answer}: what the model wrote, in order
		this.before = []; // texts and marks to go back to
		this.keepSoon = later(() => this.keep(), 300);
		this.behind = h('div', { class: 'behind', 'aria-hidden': 'true' });
		this.area = h('textarea', {
			id: 'text', value: this.text, spellcheck: false, oninput: () => this.onInput(),
			onkeydown: (event) => { if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) this.goOn(); },
			onkeyup: ({ key }) => { if (/^(Arrow|Home|End|Page)/.test(key)) this.onCaret(false); }, onclick: () => this.onCaret(true),
			onpointermove: (event) => this.onPointer(event), onpointerleave: () => this.panel.leave(),
		});
		this.sheet = h('div', { class: 'sheet' }, this.behind, this.area);
		this.notes = h('div');
		this.tools = h('div', { class: 'tools-line' });
		this.line = readoutLine();
		this.root = h('div', { class: 'continue' }, this.sheet, this.notes, h('div', { class: 'composer' }, this.tools, this.line));
		this.draw();
	}

	get isWriting() {
		return this.answer !== null && !this.answer.isOver;
	}

	keep() {
		write(KEPT, { text: this.text, marks: this.marks.map(({ start, length }) => ({ start, length })) });
	}

	// ---- what the person does ----

	onInput() {
		this.change(this.area.value);
		this.panel.hide();
		this.draw();
	}

	// Marks before the change stay, those after it move; tokens written after it were written after another text.
	change(text) {
		const { text: old, marks } = this;
		let same = 0;
		while (same < Math.min(old.length, text.length) && old[same] === text[same]) same += 1;
		let tail = 0;
		while (tail < Math.min(old.length, text.length) - same && old.at(-1 - tail) === text.at(-1 - tail)) tail += 1;
		const end = old.length - tail;
		const moved = text.length - old.length;
		this.marks = marks.flatMap(({ start, length, answer }) => [
			{ start, length: Math.min(start + length, same) - start, answer },
			{ start: Math.max(start, end) + moved, length: start + length - Math.max(start, end), answer: null },
		]).filter(({ length }) => length > 0);
		this.text = text;
		this.keepSoon();
	}

	remember() {
		this.before.push({ text: this.text, marks: this.marks });
		this.before.splice(0, this.before.length - MOST_UNDONE);
	}

	goOn() {
		if (this.isWriting || !this.model) return;
		this.remember();
		this.write();
	}

	// The newest continuation once more, with another seed.
	again() {
		const last = this.marks.at(-1);
		if (!last || this.isWriting) return;
		this.remember();
		this.change(this.text.slice(0, last.start));
		this.write();
	}

	// From the place of a token, with another one instead.
	take(mark, cluster, alternative) {
		if (this.isWriting) return;
		this.remember();
		const before = mark.answer.clusters.before(cluster, this.text.slice(0, mark.start));
		this.change(before);
		this.text = before + alternative.text;
		this.marks = [...this.marks, { start: before.length, length: alternative.text.length, answer: null }];
		this.write();
	}

	async write() {
		const prompt = this.text;
		const answer = (this.answer = new Answer(prompt));
		const mark = { start: prompt.length, length: 0, answer };
		this.marks = [...this.marks, mark];
		this.area.readOnly = true; // it grows at its end
		this.draw();
		await answer.write(this.model, { prompt }, () => {
			const written = answer.text.replace(/\r\n?/g, '\n'); // as a text area has it
			this.text = prompt + written;
			mark.length = written.length;
			this.drawSoon();
		});
		this.marks = this.marks.filter(({ length }) => length > 0);
		this.area.readOnly = false;
		this.keep();
		this.drawSoon();
	}

	stop() {
		if (this.isWriting) this.answer.stop();
	}

	undo() {
		if (this.isWriting || !this.before.length) return;
		Object.assign(this, this.before.pop());
		this.answer = null;
		this.keep();
		this.draw();
		this.area.focus();
	}

	clear() {
		this.remember();
		Object.assign(this, { text: '', marks: [], answer: null });
		this.keep();
		this.draw();
		this.area.focus();
	}

	// ---- what is seen ----

	drawSoon() {
		this.frame ??= requestAnimationFrame(() => {
			this.frame = null;
			const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 60;
			this.draw();
			if (isAtEnd && this.isWriting) scrollTo(0, document.documentElement.scrollHeight);
		});
	}

	draw() {
		if (this.area.value !== this.text) this.area.value = this.text;
		this.area.ariaLabel = t('text');
		this.area.placeholder = t('textHint');
		this.drawBehind();
		const { error, isTooLong } = this.answer ?? {};
		this.notes.replaceChildren(...(error ? [failure(error, !isTooLong && tool('tryAgain', () => this.goOn()))] : []));
		this.drawTools();
		showReadout(this.line, this.answer, this.model);
	}

	drawBehind() {
		const parts = [];
		let at = 0;
		for (const mark of this.marks) {
			parts.push(this.text.slice(at, mark.start), this.written(mark));
			at = mark.start + mark.length;
		}
		this.behind.replaceChildren(...parts, `${this.text.slice(at)}\n`); // a last empty line has a height too
	}

	// The spans of one mark are kept while it grows.
	written(mark) {
		const text = this.text.slice(mark.start, mark.start + mark.length);
		const seen = state.probabilities ? mark.answer?.seen() : null;
		if (!seen || mark.answer.text.slice(0, mark.length) !== text) {
			mark.spans = null;
			return h('span', { class: 'by-model' }, text);
		}
		mark.spans ??= new TokenText(h('span', { class: 'by-model shaded' }));
		const whole = seen.filter(({ start, text: own }) => start + own.length <= mark.length);
		mark.spans.update(whole);
		for (const { element } of mark.spans.shown) element.mark = mark;
		const end = whole.length ? whole.at(-1).start + whole.at(-1).text.length : 0;
		return h('span', {}, mark.spans.root, h('span', { class: 'by-model' }, text.slice(end)));
	}

	drawTools() {
		const main = this.isWriting ? action('stopIt', () => this.stop()) : action('goOn', () => this.goOn());
		const idle = { disabled: this.isWriting };
		const others = [
			this.marks.length && tool('again', () => this.again(), idle),
			this.before.length && tool('undoText', () => this.undo(), idle),
			this.text && tool('clear', () => this.clear(), idle),
			this.text && tool('copy', () => copy(this.text)),
			this.text && tool('saveJson', () => saveTextJson(this.model, this.text, this.marks)),
			this.text && tool('saveMarkdown', () => saveText(this.text)),
		];
		this.tools.replaceChildren(...others.filter(Boolean), h('span', { class: 'keys hint' }, t('textKeys')), main);
	}

	// ---- probabilities: of the token under the mouse, or at the caret ----

	onPointer({ clientX, clientY, pointerType }) {
		if (!state.probabilities || pointerType !== 'mouse') return;
		const anchor = document.elementsFromPoint(clientX, clientY).find((element) => element.cluster);
		if (anchor === this.under) return;
		this.under = anchor;
		if (anchor) this.panel.rest(() => this.about(anchor));
		else this.panel.leave();
	}

	onCaret(pin) {
		if (!state.probabilities) return;
		const anchor = this.tokenAt(this.area.selectionStart);
		if (anchor && this.area.selectionStart === this.area.selectionEnd) this.panel.show({ ...this.about(anchor), pin });
		else this.panel.hide();
	}

	tokenAt(place) {
		for (const { start, spans } of this.marks) {
			const found = spans?.shown.find((each) => start + each.start <= place && place < start + each.start + each.text.length);
			if (found) return found.element;
		}
		return null;
	}

	about(anchor) {
		const { cluster, mark } = anchor;
		return { anchor, host: this.sheet, cluster, take: this.isWriting ? null : (alternative) => this.take(mark, cluster, alternative) };
	}
}
