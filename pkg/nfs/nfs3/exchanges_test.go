package nfs3

import (
	"context"
	"strings"
)

// exchanges holds calls and replies of every procedure with their bytes on the wire (RFC 1813
// §3.3).
var exchanges = []exchange{
	{
		name: "NULL", call: func(ctx context.Context, c *Client) (any, error) { return nil, c.Null(ctx, cred) },
		proc: ProcNull,
	},

	// GETATTR
	{
		name: "GETATTR", call: getattr, proc: ProcGetAttr, args: fhHex, maxResult: 88,
		reply: okHex + attrHex, want: attr1,
	},
	{name: "GETATTR stale", call: getattr, proc: ProcGetAttr, reply: "00000046", err: ErrStale},
	{name: "GETATTR jukebox", call: getattr, proc: ProcGetAttr, reply: "00002718", err: ErrJukebox},
	invalid("GETATTR status out of range", ProcGetAttr, getattr, "0000004d"),
	invalid("GETATTR large status out of range", ProcGetAttr, getattr, "ffffffff"),
	invalid("GETATTR empty reply", ProcGetAttr, getattr, ""),
	invalid("GETATTR type 0", ProcGetAttr, getattr, okHex+"00000000"+attrHex[8:]),
	invalid("GETATTR type 8", ProcGetAttr, getattr, okHex+"00000008"+attrHex[8:]),

	// SETATTR
	{
		name: "SETATTR all attributes with guard",
		call: call1(func(ctx context.Context, c *Client, r *WccData) error {
			return c.SetAttr(ctx, cred, fh1, &SetAttr{HasMode: true, Mode: 0o104755, HasUID: true, UID: 7,
				HasGID: true, GID: 8, HasSize: true, Size: 1 << 32,
				AtimeHow: SetToClientTime, Atime: Time3{Sec: 9, Nsec: 10}, MtimeHow: SetToServerTime}, &Time3{Sec: 11,
				Nsec: 12}, r)
		}),
		proc: ProcSetAttr,
		args: fhHex + `00000001 000009ed 00000001 00000007 00000001 00000008 00000001 0000000100000000
			00000002 00000009 0000000a 00000001
			00000001 0000000b 0000000c`,
		maxResult: 120,
		reply:     okHex + wccHex, want: wcc1,
	},
	{
		name: "SETATTR no attributes",
		call: call1(func(ctx context.Context, c *Client, r *WccData) error {
			return c.SetAttr(ctx, cred, fh1, &SetAttr{}, nil, r)
		}),
		proc: ProcSetAttr, args: fhHex + "00000000 00000000 00000000 00000000 00000000 00000000 00000000",
		reply: okHex + wccNoneHex, want: WccData{},
	},
	{
		name: "SETATTR guard differs",
		call: call1(func(ctx context.Context, c *Client, r *WccData) error {
			return c.SetAttr(ctx, cred, fh1, &SetAttr{}, &Time3{}, r)
		}),
		proc:  ProcSetAttr,
		reply: "00002712" + wccHex, err: ErrNotSync, want: wcc1,
	},

	// LOOKUP
	{
		name: "LOOKUP", call: lookup, proc: ProcLookup, args: fhHex + "00000002 61620000", maxResult: 248,
		reply: okHex + fh2Hex + postHex + postDirHex, want: LookupResult{FH: fh2, Attr: post1, DirAttr: postDir1},
	},
	{
		name: "LOOKUP without attributes", call: lookup, proc: ProcLookup,
		reply: okHex + fh2Hex + noneHex + noneHex, want: LookupResult{FH: fh2},
	},
	{
		name: "LOOKUP no entry", call: lookup, proc: ProcLookup,
		reply: "00000002" + postDirHex, err: ErrNoEnt, want: LookupResult{DirAttr: postDir1},
	},
	invalid("LOOKUP handle of 65 bytes", ProcLookup, lookup, okHex+"00000041"+attrHex+noneHex+noneHex),
	invalid("LOOKUP handle of 4 GiB", ProcLookup, lookup, okHex+"ffffffff"+attrHex),
	invalid("LOOKUP empty handle", ProcLookup, lookup, okHex+"00000000"+noneHex+noneHex),
	invalid("LOOKUP boolean 2", ProcLookup, lookup, okHex+fh2Hex+"00000002"+attrHex+noneHex),
	invalid("LOOKUP error without attributes", ProcLookup, lookup, "00000002"),

	// ACCESS
	{
		name: "ACCESS masks bits that were not requested",
		call: call1(func(ctx context.Context, c *Client, r *AccessResult) error {
			return c.Access(ctx, cred, fh1, AccessRead|AccessExecute, r)
		}),
		proc: ProcAccess, args: fhHex + "00000021", maxResult: 96,
		reply: okHex + postHex + "ffffffdf", want: AccessResult{Attr: post1, Access: AccessRead},
	},
	{
		name: "ACCESS error",
		call: call1(func(ctx context.Context, c *Client, r *AccessResult) error {
			return c.Access(ctx, cred, fh1, 0x3f, r)
		}),
		proc:  ProcAccess,
		reply: "0000000d" + postHex, err: ErrAcces, want: AccessResult{Attr: post1},
	},

	// READLINK
	{
		name: "READLINK inline", call: readLink(4096), proc: ProcReadLink,
		args: fhHex, maxResult: 96,
		reply: okHex + postHex + "00000006 2e2e2f746f70 0000",
		want:  withBuf[ReadLinkResult]{ReadLinkResult{Attr: post1, N: 6}, "../top"},
	},
	{
		name: "READLINK placed", call: readLink(4096), proc: ProcReadLink, place: "../top",
		reply: okHex + postHex + "00000006", want: withBuf[ReadLinkResult]{ReadLinkResult{Attr: post1, N: 6}, "../top"},
	},
	invalid("READLINK placed less than the length", ProcReadLink, readLink(4096),
		okHex+postHex+"00000006").placed("../to"),
	invalid("READLINK longer than the buffer", ProcReadLink, readLink(5), okHex+postHex+"00000006 2e2e2f746f70 0000"),
	invalid("READLINK with NUL", ProcReadLink, readLink(4096), okHex+postHex+"00000006 2e2e00746f70 0000"),
	{
		name: "READLINK of a file", call: readLink(4096), proc: ProcReadLink,
		reply: "00000016" + postHex, err: ErrInval, want: withBuf[ReadLinkResult]{Res: ReadLinkResult{Attr: post1}},
	},

	// READ
	{
		name: "READ inline", call: read(16), proc: ProcRead, args: fhHex + "0000000100000002 00000010",
		maxResult: 104,
		reply:     okHex + postHex + "00000005 00000001 00000005 68656c6c6f 000000",
		want:      withBuf[ReadResult]{ReadResult{Attr: post1, N: 5, EOF: true}, "hello"},
	},
	{
		name: "READ placed", call: read(5), proc: ProcRead, place: "hello",
		reply: okHex + noneHex + "00000005 00000000 00000005", want: withBuf[ReadResult]{ReadResult{N: 5}, "hello"},
	},
	{
		name: "READ placed no data", call: read(5), proc: ProcRead, place: "-",
		reply: okHex + noneHex + "00000000 00000001 00000000", want: withBuf[ReadResult]{Res: ReadResult{EOF: true}},
	},
	{
		name: "READ error with an unused chunk", call: read(5), proc: ProcRead, place: "-",
		reply: "00000005" + postHex, err: ErrIO, want: withBuf[ReadResult]{Res: ReadResult{Attr: post1}},
	},
	invalid("READ placed less than the length", ProcRead, read(5),
		okHex+noneHex+"00000005 00000000 00000005").placed("hell"),
	invalid("READ placed more than the length", ProcRead, read(5),
		okHex+noneHex+"00000004 00000000 00000004").placed("hello"),
	invalid("READ inline data with an unused chunk", ProcRead, read(5),
		okHex+noneHex+"00000005 00000000 00000005 68656c6c6f 000000").placed("-"),
	invalid("READ count and length differ", ProcRead, read(16),
		okHex+noneHex+"00000004 00000000 00000005 68656c6c6f 000000"),
	invalid("READ more than requested", ProcRead, read(4),
		okHex+noneHex+"00000005 00000000 00000005 68656c6c6f 000000"),
	invalid("READ length beyond the reply", ProcRead, read(1<<20),
		okHex+noneHex+"00080000 00000000 00080000 68656c6c"),
	invalid("READ length of 4 GiB", ProcRead, read(16), okHex+noneHex+"ffffffff 00000000 ffffffff 68656c6c"),
	invalid("READ eof 7", ProcRead, read(16), okHex+noneHex+"00000004 00000007 00000004 68656c6c"),

	// WRITE
	{
		name: "WRITE", call: write("some data"), proc: ProcWrite,
		args: fhHex + "0000000100000002 00000009 00000001 00000009", data: "some data", maxResult: 136,
		reply: okHex + wccHex + "00000009 00000002" + verfHex, want: WriteResult{Change: wcc1, Count: 9,
			Committed: FileSync, Verf: verf1},
	},
	{
		name: "WRITE less than requested", call: write("some data"), proc: ProcWrite, data: "some data",
		reply: okHex + wccNoneHex + "00000004 00000000" + verfHex, want: WriteResult{Count: 4, Verf: verf1},
	},
	{
		name: "WRITE no data", call: write(""), proc: ProcWrite,
		args:  fhHex + "0000000100000002 00000000 00000001 00000000",
		reply: okHex + wccNoneHex + "00000000 00000001" + verfHex,
		want:  WriteResult{Committed: DataSync, Verf: verf1},
	},
	{
		name: "WRITE no space", call: write("x"), proc: ProcWrite, data: "x",
		reply: "0000001c" + wccHex, err: ErrNoSpc, want: WriteResult{Change: wcc1},
	},
	invalid("WRITE more than requested", ProcWrite, write("x"), okHex+wccNoneHex+"00000002 00000000"+verfHex),
	invalid("WRITE success without data", ProcWrite, write("x"), okHex+wccNoneHex+"00000000 00000000"+verfHex),
	invalid("WRITE committed 3", ProcWrite, write("x"), okHex+wccNoneHex+"00000001 00000003"+verfHex),

	// CREATE
	{
		name: "CREATE unchecked",
		call: call1(func(ctx context.Context, c *Client, r *CreateResult) error {
			return c.Create(ctx, cred, fh1, "abc", &CreateHow{Attr: SetAttr{HasMode: true, Mode: 0o600}}, r)
		}),
		proc:      ProcCreate,
		args:      fhHex + "00000003 61626300 00000000 00000001 00000180 00000000 00000000 00000000 00000000 00000000",
		maxResult: 280,
		reply:     okHex + "00000001" + fh2Hex + postHex + wccHex, want: CreateResult{HasFH: true, FH: fh2,
			Attr: post1, DirChange: wcc1},
	},
	{
		name: "CREATE guarded, file exists",
		call: call1(func(ctx context.Context, c *Client, r *CreateResult) error {
			return c.Create(ctx, cred, fh1, "abc", &CreateHow{Mode: Guarded}, r)
		}),
		proc:  ProcCreate,
		args:  fhHex + "00000003 61626300 00000001 00000000 00000000 00000000 00000000 00000000 00000000",
		reply: "00000011" + wccHex, err: ErrExist, want: CreateResult{DirChange: wcc1},
	},
	{
		name: "CREATE exclusive, reply without a handle",
		call: call1(func(ctx context.Context, c *Client, r *CreateResult) error {
			return c.Create(ctx, cred, fh1, "abc", &CreateHow{Mode: Exclusive, Verf: verf1}, r)
		}),
		proc: ProcCreate, args: fhHex + "00000003 61626300 00000002" + verfHex,
		reply: okHex + noneHex + noneHex + wccNoneHex, want: CreateResult{},
	},

	// MKDIR, SYMLINK, MKNOD
	{
		name: "MKDIR",
		call: call1(func(ctx context.Context, c *Client, r *CreateResult) error {
			return c.Mkdir(ctx, cred, fh1, "d", &SetAttr{HasGID: true, GID: 5}, r)
		}),
		proc:      ProcMkdir,
		args:      fhHex + "00000001 64000000 00000000 00000000 00000001 00000005 00000000 00000000 00000000",
		maxResult: 280,
		reply:     okHex + "00000001" + fh2Hex + postDirHex + wccHex, want: CreateResult{HasFH: true, FH: fh2,
			Attr: postDir1, DirChange: wcc1},
	},
	{
		name: "SYMLINK",
		call: call1(func(ctx context.Context, c *Client, r *CreateResult) error {
			return c.Symlink(ctx, cred, fh1, "l", "../x/y", &SetAttr{}, r)
		}),
		proc: ProcSymlink,
		args: fhHex + "00000001 6c000000 00000000 00000000 00000000 00000000 00000000 00000000 00000006",
		data: "../x/y", maxResult: 280,
		reply: okHex + "00000001" + fh2Hex + postHex + wccHex, want: CreateResult{HasFH: true, FH: fh2, Attr: post1,
			DirChange: wcc1},
	},
	{
		name: "MKNOD device",
		call: call1(func(ctx context.Context, c *Client, r *CreateResult) error {
			return c.Mknod(ctx, cred, fh1, "n", NF3CHR, &SetAttr{}, Device{Major: 1, Minor: 3}, r)
		}),
		proc: ProcMknod,
		args: fhHex + "00000001 6e000000 00000004 00000000 00000000 00000000 00000000 00000000 00000000 00000001" +
			"00000003",
		maxResult: 280,
		reply:     okHex + "00000001" + fh2Hex + postHex + wccHex, want: CreateResult{HasFH: true, FH: fh2,
			Attr: post1, DirChange: wcc1},
	},
	{
		name: "MKNOD pipe, not supported",
		call: call1(func(ctx context.Context, c *Client, r *CreateResult) error {
			return c.Mknod(ctx, cred, fh1, "n", NF3FIFO, &SetAttr{}, Device{Major: 1, Minor: 3}, r)
		}),
		proc:  ProcMknod,
		args:  fhHex + "00000001 6e000000 00000007 00000000 00000000 00000000 00000000 00000000 00000000",
		reply: "00002714" + wccNoneHex, err: ErrNotSupp, want: CreateResult{},
	},

	// REMOVE, RMDIR, RENAME, LINK
	{
		name: "REMOVE",
		call: call1(func(ctx context.Context, c *Client, r *WccData) error {
			return c.Remove(ctx, cred, fh1, "abcde", r)
		}),
		proc: ProcRemove, args: fhHex + "00000005 6162636465 000000", maxResult: 120,
		reply: okHex + wccHex, want: wcc1,
	},
	{
		name: "RMDIR not empty",
		call: call1(func(ctx context.Context, c *Client, r *WccData) error { return c.Rmdir(ctx, cred, fh1, "d", r) }),
		proc: ProcRmdir, args: fhHex + "00000001 64000000", maxResult: 120,
		reply: "00000042" + wccHex, err: ErrNotEmpty, want: wcc1,
	},
	{
		name: "RENAME",
		call: call1(func(ctx context.Context, c *Client, r *RenameResult) error {
			return c.Rename(ctx, cred, fh1, "a", fh2, "bb", r)
		}),
		proc: ProcRename, args: fhHex + "00000001 61000000" + fh2Hex + "00000002 62620000", maxResult: 236,
		reply: okHex + wccHex + wccNoneHex, want: RenameResult{From: wcc1},
	},
	{
		name: "LINK",
		call: call1(func(ctx context.Context, c *Client, r *LinkResult) error {
			return c.Link(ctx, cred, fh1, fh2, "bb", r)
		}),
		proc: ProcLink, args: fhHex + fh2Hex + "00000002 62620000", maxResult: 208,
		reply: okHex + postHex + wccHex, want: LinkResult{Attr: post1, DirChange: wcc1},
	},
	{
		name: "LINK too many links",
		call: call1(func(ctx context.Context, c *Client, r *LinkResult) error {
			return c.Link(ctx, cred, fh1, fh2, "bb", r)
		}),
		proc:  ProcLink,
		reply: "0000001f" + postHex + wccHex, err: ErrMLink, want: LinkResult{Attr: post1, DirChange: wcc1},
	},

	// READDIR, READDIRPLUS
	{
		name: "READDIR", call: readDir, proc: ProcReadDir, args: fhHex + "0000000000000007" + verfHex + "00001000",
		maxResult: 4196,
		reply: okHex + postDirHex + verfHex + "00000001 0000000000000023 00000001 2e000000 0000000000000001" +
			entryHex + "00000000 00000001",
		want: entries{ReadDirResult{DirAttr: postDir1, Verf: verf1, EOF: true, Entries: 2},
			[]DirEntry{{FileID: 0x23, Cookie: 1, Name: []byte(".")}, {FileID: 0x22, Cookie: 2, Name: []byte("file")}}},
	},
	{
		name: "READDIR end of directory", call: readDir, proc: ProcReadDir,
		reply: okHex + noneHex + verfHex + "00000000 00000001",
		want:  entries{Res: ReadDirResult{Verf: verf1, EOF: true}},
	},
	{
		name: "READDIR invalid cookie", call: readDir, proc: ProcReadDir,
		reply: "00002713" + postDirHex, err: ErrBadCookie, want: entries{Res: ReadDirResult{DirAttr: postDir1}},
	},
	{
		name: "READDIR invalid name after a valid one", call: readDir, proc: ProcReadDir,
		reply: okHex + noneHex + verfHex + entryHex + "00000001 0000000000000022 00000004 2e2e2f78" +
			"0000000000000003 00000000 00000001",
		malformed: true, want: entries{Res: ReadDirResult{Verf: verf1, EOF: false, Entries: 1}},
	},
	invalid("READDIR empty name", ProcReadDir, readDir, listing("00000000")),
	invalid("READDIR name with NUL", ProcReadDir, readDir, listing("00000004 66006c65")),
	invalid("READDIR name of 256 bytes", ProcReadDir, readDir, listing("00000100"+strings.Repeat("61", 256))),
	{
		name: "READDIRPLUS", call: readDirPlus, proc: ProcReadDirPlus,
		args: fhHex + "0000000000000007" + verfHex + "00000400 00001000", maxResult: 4196,
		reply: okHex + postDirHex + verfHex + entryHex + postHex + "00000001" + fh2Hex + "00000001" +
			"0000000000000024 00000002 75700000 0000000000000003" + noneHex + noneHex + "00000000 00000000",
		want: entries{ReadDirResult{DirAttr: postDir1, Verf: verf1, EOF: false, Entries: 2}, []DirEntry{
			{FileID: 0x22, Cookie: 2, Name: []byte("file"), Attr: post1, HasFH: true, FH: fh2},
			{FileID: 0x24, Cookie: 3, Name: []byte("up")},
		}},
	},
	{
		name: "READDIRPLUS not supported", call: readDirPlus, proc: ProcReadDirPlus,
		reply: "00002714" + noneHex, err: ErrNotSupp,
	},
	invalid("READDIRPLUS handle too long", ProcReadDirPlus, readDirPlus,
		okHex+noneHex+verfHex+entryHex+noneHex+"00000001"+longFHHex),

	// FSSTAT, FSINFO, PATHCONF, COMMIT
	{
		name: "FSSTAT",
		call: call1(func(ctx context.Context, c *Client, r *FSStatResult) error { return c.FSStat(ctx, cred, fh1, r) }),
		proc: ProcFSStat, args: fhHex, maxResult: 144,
		reply: okHex + postDirHex + "0000000000000001 0000000000000002 0000000000000003 0000000000000004" +
			"0000000000000005 0000000000000006 00000007",
		want: FSStatResult{Attr: postDir1, TotalBytes: 1, FreeBytes: 2, AvailBytes: 3, TotalFiles: 4, FreeFiles: 5,
			AvailFiles: 6, InvarSec: 7},
	},
	{
		name: "FSINFO",
		call: call1(func(ctx context.Context, c *Client, r *FSInfoResult) error { return c.FSInfo(ctx, cred, fh1, r) }),
		proc: ProcFSInfo, args: fhHex, maxResult: 140,
		reply: okHex + postDirHex + "00000001 00000002 00000003 00000004 00000005 00000006 00000007" +
			"0000000000000008 00000009 0000000a 0000001b",
		want: FSInfoResult{Attr: postDir1, ReadMax: 1, ReadPref: 2, ReadMult: 3, WriteMax: 4, WritePref: 5,
			WriteMult: 6, DirPref: 7, MaxFileSize: 8, TimeDelta: Time3{Sec: 9, Nsec: 10},
			Properties: FSFLink | FSFSymlink | FSFHomogeneous | FSFCanSetTime},
	},
	{
		name: "PATHCONF",
		call: call1(func(ctx context.Context, c *Client, r *PathConfResult) error {
			return c.PathConf(ctx, cred, fh1, r)
		}),
		proc: ProcPathConf, args: fhHex, maxResult: 116,
		reply: okHex + postDirHex + "00007fff 000000ff 00000001 00000000 00000001 00000000",
		want: PathConfResult{Attr: postDir1, LinkMax: 32767, NameMax: 255, NoTrunc: true, ChownRestricted: false,
			CaseInsensitive: true, CasePreserving: false},
	},
	{
		name: "COMMIT",
		call: call1(func(ctx context.Context, c *Client, r *CommitResult) error {
			return c.Commit(ctx, cred, fh1, 1<<40, 512, r)
		}),
		proc: ProcCommit, args: fhHex + "0000010000000000 00000200", maxResult: 128,
		reply: okHex + wccHex + verfHex, want: CommitResult{Change: wcc1, Verf: verf1},
	},
	{
		name: "COMMIT error",
		call: call1(func(ctx context.Context, c *Client, r *CommitResult) error {
			return c.Commit(ctx, cred, fh1, 0, 0, r)
		}),
		proc:  ProcCommit,
		reply: "00000005" + wccHex, err: ErrIO, want: CommitResult{Change: wcc1},
	},
}

// invalid returns an exchange whose reply must fail with ErrMalformed.
func invalid(name string, proc Proc, call func(context.Context, *Client) (any, error), reply string) exchange {
	return exchange{name: name, proc: proc, call: call, reply: reply, malformed: true}
}

// placed returns x with data that the transport places in ResultData; "-" means no data.
func (x exchange) placed(data string) exchange {
	x.place = data
	return x
}

// listing returns a READDIR reply with one entry of this name, which is given with its length.
func listing(name string) string {
	return okHex + noneHex + verfHex + "00000001 0000000000000022" + name + "0000000000000002 00000000 00000001"
}

// entryHex is a directory entry with the name "file".
const entryHex = "00000001 0000000000000022 00000004 66696c65 0000000000000002"

// longFHHex is a file handle of 68 bytes.
var longFHHex = "00000044" + strings.Repeat("61", 68)
