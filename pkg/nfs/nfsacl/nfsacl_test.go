package nfsacl

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// fixed answers every call with the same results and keeps the arguments.
type fixed struct {
	result []byte
	args   []byte
}

func (f *fixed) Call(_ context.Context, m *sunrpc.Message) error {
	f.args = append([]byte(nil), m.Args...)
	m.Result = append(m.Result[:0], f.result...)
	return nil
}

var (
	fh       = func() nfs3.FH { h, _ := nfs3.NewFH([]byte{1, 2, 3, 4}); return h }()
	minimal  = ACL{{TagUserObj, 6, UndefinedID}, {TagGroupObj, 4, UndefinedID}, {TagOther, 0, UndefinedID}}
	extended = ACL{{TagUserObj, 7, UndefinedID}, {TagUser, 5, 1000}, {TagGroupObj, 4, UndefinedID}, {TagGroup, 6, 50},
		{TagMask, 7, UndefinedID}, {TagOther, 0, UndefinedID}}
	owner = Owner{UID: 11, GID: 22}
)

// Bytes as Linux writes them: the minimal ACL has a mask, the owner's identifiers are set, and the
// tags of a default ACL have the bit 0x1000.
const (
	minimalWire = "00000004 00000004  00000001 0000000b 00000006  00000004 00000016 00000004" +
		"00000010 00000000 00000004  00000020 00000000 00000000"
	extendedDefaultWire = "00000006 00000006  00001001 0000000b 00000007  00001002 000003e8 00000005" +
		"00001004 00000016 00000004  00001008 00000032 00000006  00001010 00000000 00000007  00001020 00000000 00000000"
	none = "00000000 00000000"
)

func TestSetSendsWireFormat(t *testing.T) {
	f := &fixed{result: kit.Unhex("00000000 00000000")}
	var attr nfs3.PostOpAttr
	acls := ACLs{Mask: MaskAccess | MaskDefault, Access: minimal, Default: extended}
	kit.Must(t, NewClient(f).Set(t.Context(), nil, fh, &acls, owner, &attr))
	want := kit.Unhex("00000004 01020304 00000005" + minimalWire + extendedDefaultWire)
	if !bytes.Equal(f.args, want) {
		t.Errorf("arguments of SETACL: got %x\nwant %x", f.args, want)
	}
	var args Args
	kit.Must(t, ParseArgs(ProcSetACL, f.args, &args))
	if args.FH != fh || !reflect.DeepEqual(args.ACLs, acls) {
		t.Errorf("parsed arguments of SETACL: got %+v, want %+v", args, acls)
	}
}

func TestGetDecodesReplies(t *testing.T) {
	const head = "00000000 00000000" // NFS3_OK, no attributes
	entry := "00000001 00000001  00000002 00000007 00000007"
	big := "00000401 00000401" + strings.Repeat("00000002 00000007 00000007", 1025)
	for _, tt := range []struct {
		name, reply string
		mask        uint32
		want        ACLs
		err         string // "" for none
	}{
		{"both", head + "00000005" + minimalWire + extendedDefaultWire, 5, ACLs{5, minimal, extended}, ""},
		{"unsorted", head + "00000001 00000002 00000002 00000020 00000000 00000001" +
			"00000001 00000000 00000007" + none, 1,
			ACLs{1, ACL{{TagUserObj, 7, UndefinedID}, {TagOther, 1, UndefinedID}}, nil}, ""},
		{"solaris mask bits", head + "00000001 00000001 00000001 00000010 00000000 000000ff" + none, 1,
			ACLs{1, ACL{{TagMask, 7, UndefinedID}}, nil}, ""},
		{"no default ACL", head + "0000000f" + minimalWire + none, 15, ACLs{15, minimal, nil}, ""},
		{"counts alone", head + "0000000a 00000004 00000000 00000000 00000000", 10, ACLs{Mask: 10}, ""},
		{"less than requested", head + "00000001" + entry + none, 5, ACLs{}, "mask"},
		{"unknown mask", head + "00000011" + entry + none, 1, ACLs{}, "mask"},
		{"unknown tag", head + "00000001 00000001 00000001 00000003 00000007 00000007" + none, 1, ACLs{}, "tag"},
		{"perm", head + "00000001" + "00000001 00000001 00000002 00000007 00000008" + none, 1, ACLs{}, "permission"},
		{"counts differ", head + "00000001 00000002 00000001 00000002 00000007 00000007" + none, 1, ACLs{}, "counts"},
		{"1025 entries", head + "00000001" + big + none, 1, ACLs{}, "1024"},
		{"huge count", head + "00000001 ffffffff ffffffff", 1, ACLs{}, "1024"},
		{"short", head + "00000001 00000002 00000002 00000002 00000007 00000007", 1, ACLs{}, "malformed"},
		{"empty", "", 1, ACLs{}, "malformed"},
		{"status", "00000046 00000000", 1, ACLs{}, "NFS3ERR_STALE"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var attr nfs3.PostOpAttr
			c := NewClient(&fixed{result: kit.Unhex(tt.reply)})
			got, err := c.Get(t.Context(), nil, fh, tt.mask, &attr)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Fatalf("got error %v, want one with %q", err, tt.err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v\nwant %+v", got, tt.want)
			}
		})
	}
}

func TestErrorsHaveErrno(t *testing.T) {
	c := NewClient(&fixed{result: kit.Unhex("00000046 00000000")})
	_, err := c.Get(t.Context(), nil, fh, MaskAccess, new(nfs3.PostOpAttr))
	var nfsErr *nfs3.Error
	if !errors.As(err, &nfsErr) || nfsErr.Status != nfs3.ErrStale || !errors.Is(err, syscall.ESTALE) {
		t.Errorf("got %v, want an nfs3.Error with NFS3ERR_STALE", err)
	}
}

func TestGetResultRoundTrip(t *testing.T) {
	attr := nfs3.Attr{Type: nfs3.NF3DIR, UID: owner.UID, GID: owner.GID, FileID: 9}
	want := ACLs{MaskAll, extended, minimal}
	f := &fixed{result: AppendGetResult(nil, &attr, &want)}
	var post nfs3.PostOpAttr
	got, err := NewClient(f).Get(t.Context(), nil, fh, MaskAll, &post)
	if err != nil || !reflect.DeepEqual(got, want) || !post.Present || post.Attr != attr {
		t.Errorf("got %+v, %+v, %v; want %+v", got, post, err, want)
	}
}

// TestXattrFormat uses values that getfattr(1) of a local file system shows.
func TestXattrFormat(t *testing.T) {
	for _, tt := range []struct {
		name, value string
		want        ACL // nil for an error
	}{
		{"minimal", "02000000 01000600ffffffff 04000400ffffffff 20000000ffffffff", minimal},
		{"extended", "02000000 01000700ffffffff 02000500e8030000 04000400ffffffff 0800060032000000 10000700ffffffff" +
			"20000000ffffffff", extended},
		{"version", "03000000 01000600ffffffff", nil},
		{"length", "02000000 01000600ffffff", nil},
		{"tag", "02000000 03000600ffffffff", nil},
		{"permissions", "02000000 01000800ffffffff", nil},
		{"empty value", "", nil},
		{"too many", "02000000" + strings.Repeat("0200060001000000", MaxEntries+1), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			value := kit.Unhex(tt.value)
			got, err := ParseXattr(value)
			if (err == nil) != (tt.want != nil) || !reflect.DeepEqual(got, tt.want) {
				t.Fatalf("got %+v, %v; want %+v", got, err, tt.want)
			}
			if err == nil && (!bytes.Equal(got.AppendXattr(nil), value) || got.XattrSize() != len(value)) {
				t.Errorf("value: got %x, want %x", got.AppendXattr(nil), value)
			}
		})
	}
}

func TestMinimal(t *testing.T) {
	if !minimal.Minimal() || extended.Minimal() {
		t.Errorf("got %v and %v, want true and false", minimal.Minimal(), extended.Minimal())
	}
	if got := FromMode(0o640); !reflect.DeepEqual(got, minimal) {
		t.Errorf("FromMode(0640): got %v, want %v", got, minimal)
	}
}
