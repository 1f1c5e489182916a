package nfs3

import (
	"bytes"
	"context"
	"reflect"
	"testing"

	goxdr "github.com/rasky/go-xdr/xdr2"
	"github.com/vmware/go-nfs-client/nfs"
	"github.com/vmware/go-nfs-client/nfs/xdr"
)

// The oracle is an independent implementation: the NFSv3 types of go-nfs-client and its XDR
// package.

// oracleLimit limits the memory of the oracle, which allocates the length in the message.
const oracleLimit = 8192

// Arguments, with the layout of the unexported types of go-nfs-client.
type (
	oracleSetAttr struct {
		FH    []byte
		Attr  nfs.Sattr3
		Guard struct {
			SetIt bool         `xdr:"union"`
			Ctime nfs.NFS3Time `xdr:"unioncase=1"`
		}
	}
	oracleMkdir struct {
		Where nfs.Diropargs3
		Attr  nfs.Sattr3
	}
	oracleCreate struct {
		Where nfs.Diropargs3
		Mode  uint32
		Attr  nfs.Sattr3
	}
	oracleSymlink struct {
		Where nfs.Diropargs3
		Attr  nfs.Sattr3
		Path  string
	}
	oracleRename  struct{ From, To nfs.Diropargs3 }
	oracleReadDir struct {
		FH                 []byte
		Cookie, Verf       uint64
		DirCount, MaxCount uint32
	}
	oracleRead struct {
		FH     []byte
		Offset uint64
		Count  uint32
	}
	oracleWrite struct {
		FH       []byte
		Offset   uint64
		Count    uint32
		How      uint32
		Contents []byte
	}
)

// Results without the status, with the layout of the unexported types of go-nfs-client.
type (
	oracleLookupOK struct {
		FH      []byte
		Attr    nfs.PostOpAttr
		DirAttr nfs.PostOpAttr
	}
	oracleCreateOK struct {
		FH        nfs.PostOpFH3
		Attr      nfs.PostOpAttr
		DirChange nfs.WccData
	}
	oracleWriteOK struct {
		Wcc   nfs.WccData
		Count uint32
		How   uint32
		Verf  [8]byte
	}
	oracleRenameOK struct{ From, To nfs.WccData }
	oracleEntry    struct {
		IsSet bool          `xdr:"union"`
		Entry nfs.EntryPlus `xdr:"unioncase=1"`
	}
)

func oracleTime(t Time3) nfs.NFS3Time { return nfs.NFS3Time{Seconds: t.Sec, Nseconds: t.Nsec} }

func oracleSattr(a *SetAttr) nfs.Sattr3 {
	return nfs.Sattr3{
		Mode: nfs.SetMode{SetIt: a.HasMode, Mode: a.Mode & ModeMask},
		UID:  nfs.SetUID{SetIt: a.HasUID, UID: a.UID}, GID: nfs.SetUID{SetIt: a.HasGID, UID: a.GID},
		Size:  nfs.SetSize{SetIt: a.HasSize, Size: a.Size},
		Atime: nfs.SetTime{SetIt: nfs.TimeHow(a.AtimeHow), Time: oracleTime(a.Atime)},
		Mtime: nfs.SetTime{SetIt: nfs.TimeHow(a.MtimeHow), Time: oracleTime(a.Mtime)},
	}
}

// FuzzOracleArgs compares the encoded arguments of each procedure with those of the oracle.
func FuzzOracleArgs(f *testing.F) {
	f.Add([]byte{1, 2, 3}, "name", "other", "../target", uint8(0x3f), uint32(0o644), uint64(1<<33), uint32(7),
		[]byte("data"))
	f.Add([]byte{}, "n", "o", "t", uint8(0), uint32(0), uint64(0), uint32(0), []byte{})
	f.Fuzz(func(t *testing.T, handle []byte, name, other, target string, flags uint8, mode uint32, big uint64,
		small uint32, data []byte) {
		fh, err := NewFH(handle)
		if err != nil {
			return
		}
		set := SetAttr{HasMode: flags&1 != 0, Mode: mode, HasUID: flags&2 != 0, UID: small, HasGID: flags&4 != 0,
			GID: small + 1, HasSize: flags&8 != 0, Size: big,
			AtimeHow: TimeHow(flags>>4) % 3, Atime: Time3{Sec: small, Nsec: mode},
			MtimeHow: TimeHow(flags>>6) % 3, Mtime: Time3{Sec: mode, Nsec: small}}
		sattr := oracleSattr(&set)
		where, to := nfs.Diropargs3{FH: handle, Filename: name}, nfs.Diropargs3{FH: handle, Filename: other}
		guarded := oracleSetAttr{FH: handle, Attr: sattr}
		guarded.Guard.SetIt = true
		guarded.Guard.Ctime = oracleTime(Time3{Sec: small, Nsec: mode})
		size := int(small % 5000)
		read, commit := oracleRead{handle, big, uint32(size)}, oracleRead{handle, big, small}
		write := oracleWrite{handle, big, uint32(len(data)), uint32(flags) % 3, data}
		create, how := oracleCreate{where, uint32(Guarded), sattr}, CreateHow{Mode: Guarded, Attr: set}
		symlink, rename := oracleSymlink{where, sattr, target}, oracleRename{where, to}
		var page ReadDirResult
		verf := Verifier{1, 2, 3, 4, 5, 6, 7, 8}
		list := oracleReadDir{handle, big, 0x0102030405060708, min(mode, small, MaxDirCount), min(small, MaxDirCount)}

		caller := &canned{}
		c := NewClient(caller)
		ctx := context.Background()
		for _, x := range []struct {
			proc Proc
			want any
			call func()
		}{
			{ProcGetAttr, &handle, func() { c.GetAttr(ctx, cred, fh, new(Attr)) }},
			{ProcSetAttr, &guarded, func() {
				c.SetAttr(ctx, cred, fh, &set, &Time3{Sec: small, Nsec: mode},
					new(WccData))
			}},
			{ProcLookup, &where, func() { c.Lookup(ctx, cred, fh, name, new(LookupResult)) }},
			{ProcRead, &read, func() { c.Read(ctx, cred, fh, big, make([]byte, size), new(ReadResult)) }},
			{ProcWrite, &write, func() { c.Write(ctx, cred, fh, big, data, StableHow(flags)%3, new(WriteResult)) }},
			{ProcCreate, &create, func() { c.Create(ctx, cred, fh, name, &how, new(CreateResult)) }},
			{ProcMkdir, &oracleMkdir{where, sattr}, func() { c.Mkdir(ctx, cred, fh, name, &set, new(CreateResult)) }},
			{ProcSymlink, &symlink, func() { c.Symlink(ctx, cred, fh, name, target, &set, new(CreateResult)) }},
			{ProcRemove, &where, func() { c.Remove(ctx, cred, fh, name, new(WccData)) }},
			{ProcRmdir, &where, func() { c.Rmdir(ctx, cred, fh, name, new(WccData)) }},
			{ProcRename, &rename, func() { c.Rename(ctx, cred, fh, name, fh, other, new(RenameResult)) }},
			{ProcReadDirPlus, &list, func() { c.ReadDirPlus(ctx, cred, fh, big, verf, mode, small, &page, nil) }},
			{ProcFSInfo, &handle, func() { c.FSInfo(ctx, cred, fh, new(FSInfoResult)) }},
			{ProcCommit, &commit, func() { c.Commit(ctx, cred, fh, big, small, new(CommitResult)) }},
		} {
			caller.calls = 0
			x.call()
			if caller.calls == 0 {
				continue // the Client refused an invalid name
			}
			var want bytes.Buffer
			if err := xdr.Write(&want, x.want); err != nil {
				t.Fatalf("%v: %v", x.proc, err)
			}
			got := append(append([]byte{}, caller.args...), caller.data...)
			for len(got)%4 != 0 {
				got = append(got, 0)
			}
			if caller.proc != uint32(x.proc) || !bytes.Equal(got, want.Bytes()) {
				t.Fatalf("%v: got procedure %v with arguments\n     %x\nwant %x", x.proc, Proc(caller.proc), got,
					want.Bytes())
			}
		}
	})
}

// FuzzOracleResults compares the decoded results of each procedure with those of the oracle.
func FuzzOracleResults(f *testing.F) {
	for _, x := range exchanges {
		f.Add(unhex(x.reply))
	}
	f.Fuzz(func(t *testing.T, reply []byte) {
		if len(reply) < 4 || !bytes.Equal(reply[:4], []byte{0, 0, 0, 0}) {
			return // the oracle decodes only successful results
		}
		c := NewClient(&echo{result: reply})
		ctx := context.Background()
		body := reply[4:]

		var attr Attr
		compare(t, c.GetAttr(ctx, cred, fh1, &attr), body, func(o *nfs.Fattr) (any, any, bool) {
			return attr, ofAttr(o), validAttr(o)
		})
		var wcc WccData
		compare(t, c.Remove(ctx, cred, fh1, "n", &wcc), body, func(o *nfs.WccData) (any, any, bool) {
			return wcc, ofWcc(o), validPost(&o.After)
		})
		var look LookupResult
		compare(t, c.Lookup(ctx, cred, fh1, "n", &look), body, func(o *oracleLookupOK) (any, any, bool) {
			return look, LookupResult{FH: ofFH(o.FH), Attr: ofPost(&o.Attr), DirAttr: ofPost(&o.DirAttr)},
				validFH(o.FH) &&
					validPost(&o.Attr) && validPost(&o.DirAttr)
		})
		var made CreateResult
		compare(t, c.Mkdir(ctx, cred, fh1, "n", &SetAttr{}, &made), body, func(o *oracleCreateOK) (any, any, bool) {
			want := CreateResult{HasFH: o.FH.IsSet, Attr: ofPost(&o.Attr), DirChange: ofWcc(&o.DirChange)}
			if o.FH.IsSet {
				want.FH = ofFH(o.FH.FH)
			}
			return made, want, (!o.FH.IsSet || validFH(o.FH.FH)) && validPost(&o.Attr) && validPost(&o.DirChange.After)
		})
		var wrote WriteResult
		data := make([]byte, 1<<10)
		compare(t, c.Write(ctx, cred, fh1, 0, data, Unstable, &wrote), body, func(o *oracleWriteOK) (any, any, bool) {
			return wrote, WriteResult{Change: ofWcc(&o.Wcc), Count: o.Count, Committed: StableHow(o.How),
					Verf: Verifier(o.Verf)},
				validPost(&o.Wcc.After) && o.Count > 0 && o.Count <= uint32(len(data)) && o.How <= 2
		})
		var renamed RenameResult
		compare(t, c.Rename(ctx, cred, fh1, "a", fh1, "b", &renamed), body, func(o *oracleRenameOK) (any, any, bool) {
			return renamed, RenameResult{From: ofWcc(&o.From), To: ofWcc(&o.To)}, validPost(&o.From.After) &&
				validPost(&o.To.After)
		})
		var info FSInfoResult
		compare(t, c.FSInfo(ctx, cred, fh1, &info), body, func(o *nfs.FSInfo) (any, any, bool) {
			return info, FSInfoResult{Attr: ofPost(&o.Attr), ReadMax: o.RTMax, ReadPref: o.RTPref, ReadMult: o.RTMult,
					WriteMax: o.WTMax, WritePref: o.WTPref, WriteMult: o.WTMult,
					DirPref: o.DTPref, MaxFileSize: o.Size, TimeDelta: ofTime(o.TimeDelta), Properties: o.Properties},
				validPost(&o.Attr)
		})
		compareDir(t, c, body)
	})
}

// compare compares the results of a call with those of the oracle. values returns both, and reports
// whether the results of the oracle are valid for this package.
func compare[T any](t *testing.T, err error, body []byte, values func(*T) (got, want any, valid bool)) {
	t.Helper()
	var o T
	_, oracleErr := goxdr.UnmarshalLimited(bytes.NewReader(body), &o, oracleLimit)
	got, want, valid := values(&o)
	if valid = valid && oracleErr == nil; valid != (err == nil) {
		t.Fatalf("got error %v; oracle: error %v, results %+v", err, oracleErr, o)
	}
	if valid && !reflect.DeepEqual(got, want) {
		t.Fatalf("results\n got %+v\nwant %+v", got, want)
	}
}

// compareDir compares the results of READDIRPLUS. The oracle decodes one entry at a time.
func compareDir(t *testing.T, c *Client, body []byte) {
	var got entries
	err := c.ReadDirPlus(context.Background(), cred, fh1, 0, Verifier{}, 4096, 4096, &got.Res, got.add)

	var want entries
	r := bytes.NewReader(body)
	var head struct {
		Attr nfs.PostOpAttr
		Verf [8]byte
	}
	_, oracleErr := goxdr.UnmarshalLimited(r, &head, oracleLimit)
	valid := validPost(&head.Attr)
	for oracleErr == nil {
		var o oracleEntry
		if _, oracleErr = goxdr.UnmarshalLimited(r, &o, oracleLimit); oracleErr != nil || !o.IsSet {
			break
		}
		e := &o.Entry
		valid = valid && len(e.FileName) <= MaxName && validName([]byte(e.FileName)) && validPost(&e.Attr) &&
			(!e.Handle.IsSet || validFH(e.Handle.FH))
		if !valid {
			break
		}
		d := DirEntry{FileID: e.FileId, Cookie: e.Cookie, Name: []byte(e.FileName), Attr: ofPost(&e.Attr),
			HasFH: e.Handle.IsSet}
		if e.Handle.IsSet {
			d.FH = ofFH(e.Handle.FH)
		}
		want.List = append(want.List, d)
	}
	var eof bool
	if oracleErr == nil && valid {
		_, oracleErr = goxdr.UnmarshalLimited(r, &eof, oracleLimit)
	}
	if valid = valid && oracleErr == nil; valid != (err == nil) {
		t.Fatalf("READDIRPLUS: got error %v; oracle: error %v, %d entries, valid %v", err, oracleErr, len(want.List),
			valid)
	}
	want.Res = ReadDirResult{DirAttr: ofPost(&head.Attr), Verf: Verifier(head.Verf), EOF: eof, Entries: len(want.List)}
	if valid && !reflect.DeepEqual(got, want) {
		t.Fatalf("READDIRPLUS\n got %+v\nwant %+v", got, want)
	}
}

func validFH(b []byte) bool            { return len(b) > 0 && len(b) <= FHSize }
func validAttr(o *nfs.Fattr) bool      { return o.Type >= nfs.NF3Reg && o.Type <= nfs.NF3FIFO }
func validPost(o *nfs.PostOpAttr) bool { return !o.IsSet || validAttr(&o.Attr) }

func ofFH(b []byte) FH {
	h, _ := NewFH(b)
	return h
}

func ofTime(t nfs.NFS3Time) Time3 { return Time3{Sec: t.Seconds, Nsec: t.Nseconds} }

func ofAttr(o *nfs.Fattr) Attr {
	return Attr{Type: FileType(o.Type), Mode: o.FileMode & ModeMask, Nlink: o.Nlink, UID: o.UID, GID: o.GID,
		Size: o.Filesize, Used: o.Used, Rdev: Device{Major: o.SpecData[0], Minor: o.SpecData[1]}, FSID: o.FSID,
		FileID: o.Fileid,
		Atime:  ofTime(o.Atime), Mtime: ofTime(o.Mtime), Ctime: ofTime(o.Ctime)}
}

func ofPost(o *nfs.PostOpAttr) PostOpAttr {
	if !o.IsSet {
		return PostOpAttr{}
	}
	return PostOpAttr{Present: true, Attr: ofAttr(&o.Attr)}
}

func ofWcc(o *nfs.WccData) WccData {
	w := WccData{HasBefore: o.Before.IsSet, HasAfter: o.After.IsSet}
	if w.HasBefore {
		w.Before = WccAttr{Size: o.Before.Size, Mtime: ofTime(o.Before.MTime), Ctime: ofTime(o.Before.CTime)}
	}
	if w.HasAfter {
		w.After = ofAttr(&o.After.Attr)
	}
	return w
}
