// The line below what is being written: how fast, how soon, how much of the context.

import { h } from './dom.js';
import { count, duration, whole } from './format.js';
import { t } from './words.js';

export const readoutLine = () => h('p', { class: 'readout hint' });

export function showReadout(line, answer, model) {
	line.replaceChildren(...(answer ? parts(answer, model) : []).map((part) => h('span', {}, part)));
}

function parts(answer, model) {
	if (answer.state === 'waiting') return [t('waiting')];
	const { toFirst, perSecond, inContext } = answer.figures;
	const total = model?.z2a?.max_len;
	return [
		perSecond && t('perSecond', { count: count(perSecond) }),
		toFirst !== null && t('toFirst', { time: toFirst < 1 ? `${Math.round(1000 * toFirst)} ms` : duration(toFirst) }),
		inContext && total && t('inContext', { count: whole(inContext), total: whole(total) }),
		answer.isOver && t(answer.state),
		answer.isOver && t('seedWas', { seed: answer.seed }),
	].filter(Boolean);
}
