package svcrdma

import (
	"context"
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A msgBuf holds one unreduced message or the data of one Send. It is registered for local access.
type msgBuf struct {
	mem []byte
	mr  verbs.MR
}

// destroy frees the buffer. The device must not use it any more.
func (b *msgBuf) destroy() error {
	err := b.mr.Dereg()
	membuf.Free(b.mem)
	return err
}

func (c *conn) makeBuf(size int) (*msgBuf, error) {
	mem, err := membuf.Alloc(size)
	if err != nil {
		return nil, err
	}
	mr, err := c.pd.RegMR(mem)
	if err != nil {
		membuf.Free(mem)
		return nil, err
	}
	return &msgBuf{mem: mem, mr: mr}, nil
}

// getBufs stores len(out) message buffers of Config.MaxMessage bytes in out. It returns all or
// none.
func (c *conn) getBufs(out []*msgBuf) error {
	if c.takeUnused(out) {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.CallTimeout)
	defer cancel()
	if err := c.mem.take(ctx, c, len(out)); err != nil {
		return fmt.Errorf("wait for memory for a message: %w", err)
	}
	for i := range out {
		b, err := c.makeBuf(c.cfg.MaxMessage)
		if err != nil {
			// This error ends the connection, which frees the buffers that were allocated.
			c.mem.give(c, len(out)-i)
			return fmt.Errorf("message buffer: %w", err)
		}
		out[i] = b
		c.messages.Lock()
		c.messages.all[b] = struct{}{}
		c.messages.Unlock()
	}
	return nil
}

// takeUnused takes unused buffers, most recently used first because their pages are in the cache.
func (c *conn) takeUnused(out []*msgBuf) bool {
	c.messages.Lock()
	defer c.messages.Unlock()
	n := len(c.messages.unused) - len(out)
	if n < 0 {
		return false
	}
	copy(out, c.messages.unused[n:])
	c.messages.unused = c.messages.unused[:n]
	return true
}

// putBufs returns buffers to the connection, and frees them when a call waits for memory.
func (c *conn) putBufs(bufs []*msgBuf) {
	c.messages.Lock()
	c.messages.unused = append(c.messages.unused, bufs...)
	c.messages.Unlock()
	if c.mem.short() {
		c.freeUnused()
	}
}

// freeUnused frees the buffers that no call holds.
func (c *conn) freeUnused() {
	c.messages.Lock()
	unused := c.messages.unused
	c.messages.unused = nil
	for _, b := range unused {
		delete(c.messages.all, b)
	}
	c.messages.Unlock()
	for _, b := range unused {
		c.must(b.destroy())
	}
	if len(unused) > 0 {
		c.mem.give(c, len(unused))
	}
}
