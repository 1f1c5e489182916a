package nfsserve

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Programs beside NFS (RFC 1813 §5, RFC 1833 §3).
const (
	progMount   = 100005
	progPortmap = 100000
)

// Sizes in bytes.
const (
	smallRecord = 64 << 10 // a larger call takes memory before it is read
	smallReply  = 32 << 10 // bounds the replies of all procedures but READ, READDIR and READDIRPLUS
	readHeaders = 1 << 10  // bounds a reply of READ without the data
)

// A tcpCall is a call that has arrived, and the memory that it holds.
type tcpCall struct {
	message *[]byte // the call; nil after putMessage
	share   *tcpShare
	memory  int64 // in bytes, of tcpServer.memory
	reply   int   // largest size of the reply in bytes, if the call is small
}

// classify finds out which share the call uses, and how large its reply can be. A large call keeps
// the share from which it has its memory.
func (c *tcpCall) classify(client *tcpClient) {
	c.reply = smallReply
	h, args, err := sunrpc.ParseCall(*c.message)
	if err != nil || c.memory > 0 {
		return
	}
	switch h.Prog {
	case progMount, progPortmap:
		c.share = &client.mount
	case nfs3.Program:
		c.reply = replyBound(nfs3.Proc(h.Proc), args)
	}
}

// replyBound bounds the size of a reply of NFS.
func replyBound(proc nfs3.Proc, args []byte) int {
	switch proc {
	case nfs3.ProcRead:
		d := sunrpc.NewDecoder(args)
		d.Opaque(nfs3.FHSize)
		d.Uint64() // the offset
		if n := d.Uint32(); d.Err() == nil && n > smallReply-readHeaders {
			return maxRecord
		}
	case nfs3.ProcReadDir, nfs3.ProcReadDirPlus:
		return maxRecord
	}
	return smallReply
}

// Messages are in pools by their size, so that a small call or reply does not keep the memory of a
// large one.
var smallMessages, largeMessages = sync.Pool{New: newMessage}, sync.Pool{New: newMessage}

func newMessage() any { return new([]byte) }

// getMessage returns a buffer for a message of at most n bytes.
func getMessage(n int) *[]byte {
	if n <= smallRecord {
		return smallMessages.Get().(*[]byte)
	}
	return largeMessages.Get().(*[]byte)
}

func putMessage(b *[]byte) {
	if cap(*b) <= 2*smallRecord { // append may allocate more than it needs
		smallMessages.Put(b)
	} else {
		largeMessages.Put(b)
	}
}
