package integration

// knownDifferences are outcomes that differ because NFSv3, or every client of it, cannot do what a
// local file system does. A difference that this server or this client can avoid does not belong
// here.
var knownDifferences = []difference{
	{"fallocate", "a fallocate f keep 0 10000 => ENOTSUP", "NFSv3 has no procedure that allocates space"},
	{"extended attributes", "a setxattr f user.test value => ENOTSUP", "NFSv3 has no extended attributes"},
	{"exchange", "a renameat2 f g exchange => EINVAL", "RENAME of NFSv3 has no flags"},
	{"times before 1970", "a times f => atime=0.000000000 mtime=0.000000000",
		"nfstime3 holds seconds as an unsigned integer (RFC 1813 §2.5)"},
	{"rmdir of an open directory", "a fstat d => ESTALE",
		"RMDIR removes the object of a handle that another process has open"},
}
