package slotfile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strings"
	"sync/atomic"
	"unsafe"
)

// Places of the header, see the package comment.
const (
	magic         = 0x656c6966746f6c73 // "slotfile" in little endian
	formatVersion = 1

	headerBytes = 4096
	entryBytes  = 64
	maxTables   = headerBytes/entryBytes - 1
	regionAlign = 4096 // of the first slot of a table

	atMagic    = 0
	atFormat   = 8
	atSchema   = 12
	atTables   = 16
	atSum      = 20
	atSize     = 24
	atRestarts = 32

	entryName     = 0
	entryRecord   = 32
	entryCounters = 36
	entryMax      = 40
	entryOffset   = 48
	entryBacked   = 56
)

// Limits of a file. They exclude overflow in the computation of its size.
const (
	MaxNameBytes   = 32
	MaxRecordBytes = 1 << 16
	MaxCounters    = 2048
	MaxSlots       = 1 << 30
	MaxFileBytes   = 1 << 40
)

var order = binary.NativeEndian

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A TableSpec describes a table.
type TableSpec struct {
	Name        string // 1 to MaxNameBytes bytes without NUL, unique in the file
	RecordBytes int    // size of each record, 1 to MaxRecordBytes
	Counters    int    // 64-bit counters of each slot, 0 to MaxCounters
	MaxSlots    int    // hard maximum of slots, 1 to MaxSlots
}

func (s *TableSpec) check() error {
	switch {
	case len(s.Name) == 0 || len(s.Name) > MaxNameBytes || strings.Contains(s.Name, "\x00"):
		return fmt.Errorf("table name %q: need 1 to %d bytes without NUL", s.Name, MaxNameBytes)
	case s.RecordBytes < 1 || s.RecordBytes > MaxRecordBytes:
		return fmt.Errorf("table %s: record of %d bytes: need 1 to %d", s.Name, s.RecordBytes, MaxRecordBytes)
	case s.Counters < 0 || s.Counters > MaxCounters:
		return fmt.Errorf("table %s: %d counters: need 0 to %d", s.Name, s.Counters, MaxCounters)
	case s.MaxSlots < 1 || s.MaxSlots > MaxSlots:
		return fmt.Errorf("table %s: maximum of %d slots: need 1 to %d", s.Name, s.MaxSlots, MaxSlots)
	}
	return nil
}

func (s *TableSpec) copyBytes() int64 { return int64(s.RecordBytes+7) &^ 7 }
func (s *TableSpec) slotBytes() int64 { return 8 + 8*int64(s.Counters) + 2*s.copyBytes() }

// place returns the offsets of the tables and the size of the file.
func place(specs []TableSpec) (offsets []int64, size int64, err error) {
	if len(specs) == 0 || len(specs) > maxTables {
		return nil, 0, fmt.Errorf("%d tables: need 1 to %d", len(specs), maxTables)
	}
	names := make(map[string]bool)
	size = headerBytes
	for i := range specs {
		s := &specs[i]
		if err := s.check(); err != nil {
			return nil, 0, err
		}
		if names[s.Name] {
			return nil, 0, fmt.Errorf("two tables with the name %s", s.Name)
		}
		names[s.Name] = true
		offsets = append(offsets, size)
		size += (s.slotBytes()*int64(s.MaxSlots) + regionAlign - 1) &^ (regionAlign - 1)
	}
	if size > min(MaxFileBytes, int64(^uint(0)>>1)) {
		return nil, 0, fmt.Errorf("tables need %d bytes: the maximum is %d", size, int64(MaxFileBytes))
	}
	return offsets, size, nil
}

// header returns the header of a file without slots.
func header(schema uint32, specs []TableSpec, offsets []int64, size int64) []byte {
	h := make([]byte, headerBytes)
	order.PutUint64(h[atMagic:], magic)
	order.PutUint32(h[atFormat:], formatVersion)
	order.PutUint32(h[atSchema:], schema)
	order.PutUint32(h[atTables:], uint32(len(specs)))
	order.PutUint64(h[atSize:], uint64(size))
	for i, s := range specs {
		e := entry(h, i)
		copy(e[entryName:], s.Name)
		order.PutUint32(e[entryRecord:], uint32(s.RecordBytes))
		order.PutUint32(e[entryCounters:], uint32(s.Counters))
		order.PutUint32(e[entryMax:], uint32(s.MaxSlots))
		order.PutUint64(e[entryOffset:], uint64(offsets[i]))
	}
	order.PutUint32(h[atSum:], crc32.Checksum(h, castagnoli))
	order.PutUint64(h[atRestarts:], checked(0))
	for i := range specs {
		order.PutUint64(entry(h, i)[entryBacked:], checked(0))
	}
	return h
}

// fixed returns a copy of the header h, in which the fields that change are zero.
func fixed(h []byte) []byte {
	h = bytes.Clone(h[:headerBytes])
	clear(h[atRestarts : atRestarts+8])
	for i := range min(order.Uint32(h[atTables:]), maxTables) {
		clear(entry(h, i)[entryBacked : entryBacked+8])
	}
	return h
}

// headerSum returns the checksum of the header h.
func headerSum(h []byte) uint32 {
	h = fixed(h)
	clear(h[atSum : atSum+4])
	return crc32.Checksum(h, castagnoli)
}

// readHeader checks the header of mem, which is the whole file. It returns the specs of the tables
// with the maximum of slots that the file has, and their offsets.
func readHeader(mem []byte, schema uint32, specs []TableSpec) ([]TableSpec, []int64, error) {
	if len(mem) < headerBytes {
		return nil, nil, corrupt("size is %d bytes; the header has %d", len(mem), headerBytes)
	}
	h := bytes.Clone(mem[:headerBytes])
	if m := order.Uint64(h[atMagic:]); m != magic {
		return nil, nil, corrupt("magic is %#x, want %#x", m, uint64(magic))
	}
	v := &VersionError{Format: order.Uint32(h[atFormat:]), Schema: order.Uint32(h[atSchema:])}
	if v.Format != formatVersion {
		return nil, nil, v
	}
	if sum, want := order.Uint32(h[atSum:]), headerSum(h); sum != want {
		return nil, nil, corrupt("header: checksum is %#x, want %#x", sum, want)
	}
	if v.Schema != schema || int(order.Uint32(h[atTables:])) != len(specs) {
		return nil, nil, v
	}
	// The file decides on the maximum. The rest must be equal to what the caller expects.
	own := make([]TableSpec, len(specs))
	for i, s := range specs {
		s.MaxSlots = int(order.Uint32(entry(h, i)[entryMax:]))
		own[i] = s
	}
	offsets, size, err := place(own)
	if err != nil {
		return nil, nil, corrupt("header: %v", err)
	}
	want := header(schema, own, offsets, size)
	for i := range specs {
		const end = entryMax
		if !bytes.Equal(entry(h, i)[:end], entry(want, i)[:end]) {
			return nil, nil, v
		}
	}
	if !bytes.Equal(fixed(h), fixed(want)) {
		return nil, nil, corrupt("header: a field is invalid")
	}
	if size != int64(len(mem)) {
		return nil, nil, corrupt("size is %d bytes, want %d", len(mem), size)
	}
	return own, offsets, nil
}

// entry returns the entry of table i in the header h.
func entry[I int | uint32](h []byte, i I) []byte {
	return h[entryBytes*(int(i)+1):][:entryBytes:entryBytes]
}

// checked returns the checked word of v.
func checked(v uint32) uint64 { return uint64(^v)<<32 | uint64(v) }

// value returns the value of a checked word.
func value(w uint64) (v uint32, ok bool) { return uint32(w), w == checked(uint32(w)) }

// word returns the word at the start of b, whose address must be a multiple of 8.
func word(b []byte) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[:8][0])) }
