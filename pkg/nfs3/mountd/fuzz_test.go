package mountd

import (
	"bytes"
	"context"
	"errors"
	"net"
	"reflect"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// FuzzDecode gives the octets to each decoder as its results. What decodes must be what the oracle
// reads, or come back the same when it is encoded and decoded again; memory follows the octets, not
// the lengths in them.
func FuzzDecode(f *testing.F) {
	f.Add(unhex("00000000 00000005 0102030405000000 00000002 00000001 00000006"))
	f.Add(unhex("00000002"))
	f.Add(unhex("00000001 00000002 2f610000 00000001 00000004 68312f38 00000000 00000000"))
	f.Add(unhex("00000001 00000002 68310000 00000002 2f610000 00000000"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		got, err := decodeMount(b)
		exports, exportsErr := decodeExports(b)
		entries, entriesErr := decodeDump(b)
		runtime.ReadMemStats(&after)
		// An Export with an empty name takes 12 bytes on the wire and 40 in memory. Each value takes
		// some more for reflection.
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 64<<10+128*uint64(len(b)) {
			t.Fatalf("decoders allocated %d bytes for %d", grown, len(b))
		}
		want, wantErr := referenceMount(b)
		if (wantErr == nil) != (err == nil) {
			t.Fatalf("decodeMount: got error %v, want %v", err, wantErr)
		}
		if err == nil && !reflect.DeepEqual(got, want) {
			t.Fatalf("decodeMount: got %+v, want %+v", got, want)
		}
		if exportsErr == nil {
			again, err := decodeExports(encodeExports(exports))
			if err != nil || !reflect.DeepEqual(again, exports) || len(encodeExports(exports)) > len(b) {
				t.Fatalf("exports %q again %q, error %v", exports, again, err)
			}
		}
		if entriesErr == nil {
			again, err := decodeDump(encodeDump(entries))
			if err != nil || !reflect.DeepEqual(again, entries) || len(encodeDump(entries)) > len(b) {
				t.Fatalf("mounts %q again %q, error %v", entries, again, err)
			}
		}
	})
}

// referenceMount decodes a mountres3 with the decoder of package sunrpc.
func referenceMount(b []byte) (m mountReply, err error) {
	d := sunrpc.NewDecoder(b)
	m.stat = Stat(d.Uint32())
	if d.Err() != nil || m.stat != MNT3OK {
		return m, d.Err()
	}
	handle := d.Opaque(nfs3.FHSize)
	n := d.Uint32()
	if d.Err() != nil || len(handle) == 0 || n > maxFlavors {
		return m, sunrpc.ErrMalformed
	}
	m.flavors = make([]uint32, n)
	for i := range m.flavors {
		m.flavors[i] = d.Uint32()
	}
	m.fh, err = nfs3.NewFH(handle)
	return m, errors.Join(err, d.Err())
}

func encodeExports(list []Export) (b []byte) {
	for _, e := range list {
		b = sunrpc.AppendString(sunrpc.AppendBool(b, true), e.Dir)
		for _, g := range e.Groups {
			b = sunrpc.AppendString(sunrpc.AppendBool(b, true), g)
		}
		b = sunrpc.AppendBool(b, false)
	}
	return sunrpc.AppendBool(b, false)
}

func encodeDump(list []Entry) (b []byte) {
	for _, e := range list {
		b = sunrpc.AppendString(sunrpc.AppendString(sunrpc.AppendBool(b, true), e.Host), e.Dir)
	}
	return sunrpc.AppendBool(b, false)
}

// FuzzReplies answers a call with any record. With match set, the XID is the XID of the call. The
// call must return the results of the record or an error.
func FuzzReplies(f *testing.F) {
	f.Add(true, append(sunrpc.AppendAcceptedReply(nil, 1, sunrpc.Success), 0, 0, 8, 1))
	f.Add(false, append(sunrpc.AppendAcceptedReply(nil, 1, sunrpc.Success), 0, 0, 8, 1))
	f.Add(true, sunrpc.AppendDeniedReply(nil, 1, sunrpc.AuthTooWeak))
	f.Add(true, sunrpc.AppendProgMismatchReply(nil, 1, 1, 2))
	f.Fuzz(func(t *testing.T, match bool, reply []byte) {
		if len(reply) > maxRecord {
			return
		}
		_, want, parseErr := sunrpc.ParseReply(reply)
		got, err := exchangeWith(match, reply)
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			t.Fatal("call does not end")
		case match && parseErr == nil:
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("got results %x, error %v; want results %x", got, err, want)
			}
		case err == nil && match:
			t.Fatalf("got results %x, want error %v", got, parseErr)
		}
	})
}

// exchangeWith makes a call to a server that answers with the record.
func exchangeWith(match bool, reply []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	server, conn := net.Pipe()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		defer server.Close()
		call, err := rpctcp.ReadRecord(server, nil, maxRecord)
		if err != nil {
			return
		}
		reply := bytes.Clone(reply)
		if match && len(reply) >= sunrpc.SizeUint32 {
			copy(reply, call[:sunrpc.SizeUint32])
		}
		rpctcp.WriteRecord(server, reply)
	})
	return exchange(ctx, conn, sunrpc.Message{Cred: sunrpc.AppendAuthNone(nil)})
}
