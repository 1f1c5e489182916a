package softiwarp

import "github.com/nfsrdmad/nfsrdmad/pkg/verbs"

// takesInline reports whether a poster can send the first entry of the send queue. The caller holds
// mu, txBusy is false, and the writer has no other work.
func (t *transmitter) takesInline() bool {
	q := t.q
	if !q.queueReady() {
		return false
	}
	t.b.begin()
	return t.fitsWhole(q.mu.sq.At(q.mu.sq.sent))
}

// fitsWhole reports whether a poster can add all of e to the batch.
func (t *transmitter) fitsWhole(e *sqe) bool {
	if e.local() { // PostSend has executed those at the front of the queue
		return false
	}
	if e.op == verbs.OpRDMARead {
		return t.b.fits(0)
	}
	if e.length > inlineBytes || t.b.total > inlineBytes {
		return false
	}
	fpdus := int(e.length)/(t.mulpdu-untaggedHdr) + 1
	if t.b.crc && (fpdus > 1 || t.b.nends > 0) {
		return false
	}
	return t.b.room(fpdus, len(e.sges))
}

// sendInline executes the send queue on the goroutine of a poster, which has set txBusy. It does
// not wait for the socket. It continues with requests that other goroutines post meanwhile, and
// leaves to the writer what it does not finish.
func (t *transmitter) sendInline() {
	q := t.q
	for range inlineRounds {
		q.mu.Lock()
		pushed := q.runLocal()
		ready := q.mu.state == qpReady && q.queueReady() && !q.responseReady()
		t.claim()
		q.mu.Unlock()
		if pushed {
			q.sendCQ.wake()
		}
		if !ready {
			break
		}
		t.b.nowait = true
		t.err = t.runQueue()
		t.b.nowait = false
		if t.unsent = t.err != nil; t.unsent || t.at == t.from {
			break
		}
	}
	q.mu.Lock()
	q.mu.txBusy = false
	q.mu.sq.claimed = t.at // of an unsent batch
	wake := t.unsent || q.mu.state == qpDead || q.writerNeeded()
	q.mu.Unlock()
	if wake {
		q.wakeWriter()
	}
}

// finishUnsent continues what a poster left.
func (t *transmitter) finishUnsent() error {
	err := t.err
	t.err, t.unsent = nil, false
	if err != errSocketFull {
		return err
	}
	return t.flush(t.at)
}
