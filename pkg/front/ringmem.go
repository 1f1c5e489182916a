package front

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/memfd"
)

// Layout of the memory of an entry. The kernel writes the header and the payload, and reads them
// when the entry replies.
const (
	slotRecordAt  = 320  // slotRecord
	slotRequestAt = 512  // the request, if it is small
	slotReplyAt   = 2048 // the reply before its data, at most smallReply bytes
	slotPage      = 4096 // the payload begins here
	// slotRequestMax bounds the requests that are copied.
	slotRequestMax = slotReplyAt - slotRequestAt
)

// A slotRecord says what an entry does, for a process that takes over. It is in the memory of the
// entry. Requests are named by their commit ID, which no other request of the connection has.
type slotRecord struct {
	queue     uint64 // plus 1; 0 if there is no entry
	copied    uint64 // the request at slotRequestAt
	replied   uint64 // the request whose reply is complete
	replySize uint64 // bytes of the reply at slotReplyAt
	dataSize  uint64 // bytes of the reply in the payload
}

// Ring memory has a page with a ringHeader, and then the entries.
type ringHeader struct {
	magic, address, payload, queues uint64
	// files are the nodes of the regular files that were used last, see rings.noteFile. They are
	// at place node % notedFiles; 0 is none.
	files [notedFiles]uint64
}

const (
	ringMagic = 0x3130676e69724e00 | 'N' // "NNring01"
	// ringBase is the lowest address of ring memory, and ringSpace the address space for each
	// connection. The kernel keeps the addresses of an entry, so a process that takes over maps
	// the memory at the same address. Go, the race detector and mmap(2) use other addresses.
	ringBase, ringSpace = 0x640000000000, 4 << 30
	ringPlaces          = 4096
	ringMapTries        = 64
	notedFiles          = 16
)

// ringMemory is the memory of the entries of a connection.
type ringMemory struct {
	file    *os.File
	all     []byte
	payload int // bytes of the payload of an entry
}

func ringMemorySize(payload int) int { return os.Getpagesize() + maxEntries*(slotPage+payload) }

// newRingMemory makes memory for maxEntries entries. Only what is used takes memory of the host.
func newRingMemory(payload, queues int) (*ringMemory, error) {
	page := os.Getpagesize()
	payload = (payload + page - 1) / page * page
	size := ringMemorySize(payload)
	if size > ringSpace {
		return nil, fmt.Errorf("buffers of %d bytes are too large", payload)
	}
	fd, err := memfd.Create("nfsrdmad-rings", int64(size), memfd.Sealed)
	if err != nil {
		return nil, err
	}
	m := &ringMemory{file: os.NewFile(uintptr(fd), "nfsrdmad-rings"), payload: payload}
	for try := 0; ; try++ {
		address := ringBase + uintptr(rand.IntN(ringPlaces))*ringSpace
		if m.all, err = mapAt(address, size, fd); err == nil {
			*m.header() = ringHeader{magic: ringMagic, address: uint64(address), payload: uint64(payload),
				queues: uint64(queues)}
			return m, nil
		}
		if try == ringMapTries || !errors.Is(err, unix.EEXIST) {
			m.close()
			return nil, err
		}
	}
}

// openRingMemory maps the memory of another process. It duplicates the descriptor.
func openRingMemory(f *os.File) (*ringMemory, error) {
	var h ringHeader
	if _, err := f.ReadAt(bytesOf(&h), 0); err != nil {
		return nil, err
	}
	place := (h.address - ringBase) / ringSpace
	if h.magic != ringMagic || h.address != ringBase+place*ringSpace || place >= ringPlaces ||
		h.payload%uint64(os.Getpagesize()) != 0 || h.payload > ringSpace ||
		ringMemorySize(int(h.payload)) > ringSpace || h.queues == 0 || h.queues > maxQueues {
		return nil, errors.New("memory of FUSE over io_uring has an unknown format")
	}
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := ringMemorySize(int(h.payload))
	if st.Size() != int64(size) {
		return nil, fmt.Errorf("memory of FUSE over io_uring has %d bytes, want %d", st.Size(), size)
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	m := &ringMemory{file: os.NewFile(uintptr(fd), "nfsrdmad-rings"), payload: int(h.payload)}
	if m.all, err = mapAt(uintptr(h.address), size, fd); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// mapAt maps a file at a fixed address that is free.
func mapAt(address uintptr, size, fd int) ([]byte, error) {
	const flags = unix.MAP_SHARED | unix.MAP_FIXED_NOREPLACE
	p, err := unix.MmapPtr(fd, 0, unsafe.Add(nil, address), uintptr(size), unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		return nil, os.NewSyscallError("mmap of ring memory", err)
	}
	return unsafe.Slice((*byte)(p), size), nil
}

func (m *ringMemory) close() {
	if m.all != nil {
		_ = unix.MunmapPtr(unsafe.Pointer(&m.all[0]), uintptr(len(m.all)))
	}
	_ = m.file.Close()
}

func (m *ringMemory) header() *ringHeader { return (*ringHeader)(unsafe.Pointer(&m.all[0])) }

// slot returns the memory of entry i.
func (m *ringMemory) slot(i int) []byte {
	size := slotPage + m.payload
	at := os.Getpagesize() + i*size
	return m.all[at : at+size : at+size]
}

func (e *entry) record() *slotRecord { return (*slotRecord)(unsafe.Pointer(&e.mem[slotRecordAt])) }

func (e *entry) commitID() uint64 { return binary.NativeEndian.Uint64(e.mem[entryCommitID:]) }
