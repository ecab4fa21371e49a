// Text shown token by token, each shaded by its probability.

import { h } from './dom.js';
import { probability } from './tokens.js';
import { t } from './words.js';

export const LEVELS = [0.9, 0.5, 0.1, 0.01, 0]; // a shade from each on

export const percent = (share) => (share >= 0.9995 ? '100%' : share < 0.001 ? '<0.1%' : `${(100 * share).toFixed(1)}%`);
export const visible = (text) => text.replaceAll('\n', '↵').replaceAll('\t', '⇥').replaceAll(' ', '␣');
const together = (cluster) => cluster.tokens.reduce((product, token) => product * probability(token), 1);
const shade = (share) => `token shade-${LEVELS.findIndex((least) => share >= least)}`;

export function legend() {
	const words = LEVELS.map((least, i) => (i ? (least ? `${100 * least}–${100 * LEVELS[i - 1]}%` : `<${100 * LEVELS[i - 1]}%`) : `≥${100 * least}%`));
	return h('p', { class: 'legend-line hint' }, `${t('legend')} `, words.map((word, i) => [h('span', { class: `token shade-${i}` }, word), ' ']), t('legendHint'));
}

// Keeps its spans while text is added at the end. Where they are `buttons`, Tab reaches one of them and arrows the rest,
// and line breaks are marked.
export class TokenText {
	constructor(root, { buttons = false } = {}) {
		this.root = root;
		this.buttons = buttons;
		this.shown = []; // {text, cluster, element}
		if (buttons) root.addEventListener('keydown', (event) => this.move(event));
	}

	update(seen) {
		let same = 0;
		while (same < Math.min(seen.length, this.shown.length) && this.isSame(seen[same], this.shown[same])) same += 1;
		for (const { element } of this.shown.splice(same)) element.remove();
		const added = seen.slice(same).map((each, i) => ({ ...each, element: this.span(each, same + i === 0) }));
		this.root.append(...added.map(({ element }) => element));
		this.shown.push(...added);
	}

	isSame(a, b) {
		return a.cluster === b.cluster && a.text === b.text && a.start === b.start;
	}

	span({ text, cluster }, isFirst) {
		const share = together(cluster);
		const props = { class: shade(share) };
		if (this.buttons) Object.assign(props, { role: 'button', tabIndex: isFirst ? 0 : -1, 'aria-label': `${visible(text)} ${percent(share)}` });
		const element = h('span', props, this.buttons ? text.split(/(?=\n)/).map((line) => [line[0] === '\n' && h('i', { class: 'break' }), line]) : text);
		element.cluster = cluster;
		return element;
	}

	move(event) {
		const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
		const place = by && this.shown.findIndex(({ element }) => element === event.target);
		const next = by && this.shown[place + by]?.element;
		if (!next || place < 0) return;
		event.target.tabIndex = -1;
		next.tabIndex = 0;
		next.focus();
		event.preventDefault();
	}
}
